"""On a CPU what is the same all along a register's lanes takes as long as what differs: costly values of few axes are made by themselves."""
from tokamak.fuse.axes import Group
from tokamak.fuse.plan import plan
from tokamak.ir.parse import parse_graph
from tokamak.target import Target

GATES = """graph gates {{
  input %x: f32[4, 32, 128](4096, 128, 1)
  input %b: f32[{states}](1)
  %gate: f32[4, 32, 128](4096, 128, 1) = {gate}
  %out: f32[4, 32, 128, {states}]({whole}, {image}, {states}, 1) = mul(%gate[i0, i1, i2], %b[i3])
  return %gate, %out
}}"""


def groups(gate: str, states: int) -> int:
    graph = parse_graph(GATES.format(gate=gate, states=states, image=128 * states, whole=4096 * states))
    return sum(isinstance(s, Group) for s in plan(graph, Target(vector_bytes=64, threads=2)).steps)


def test_costly_values_are_not_made_in_lanes_that_are_all_alike():
    assert groups("log1p(exp(%x[i0, i1, i2]))", 16) == 2


def test_cheap_values_are_made_where_they_are_read():
    assert groups("add(%x[i0, i1, i2], 1.0:f32)", 16) == 1


def test_what_saves_more_than_the_lanes_lose_is_one_kernel():
    """Rows' norms beside the rows: few values for many elements."""
    graph = parse_graph("""graph rows {
  input %x: f32[2048, 768](768, 1)
  input %s: f32[2048](1)
  %t: f32[2048](1) = exp(%s[i0])
  %m: f32[2048](1) for i1<768 = max[i1](mul(%x[i0, i1], %t[i0]))
  %y: f32[2048, 768](768, 1) = sub(mul(%x[i0, i1], %t[i0]), %m[i0])
  return %y, %t
}""")
    assert sum(isinstance(s, Group) for s in plan(graph, Target(vector_bytes=64, threads=2)).steps) == 1
