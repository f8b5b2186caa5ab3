"""What shares a kernel on a GPU, and what does not."""
from __future__ import annotations

from tokamak.fuse.axes import Group
from tokamak.fuse.plan import plan
from tokamak.ir.parse import parse_graph
from tokamak.target import target

GPU = target("cpu", interpret=True)


def test_readers_of_one_table_share_a_kernel_only_where_a_value_has_all_axes():
    """Rotary embeddings of 32 query and 8 key heads: in one kernel each program would make all of one for every step along the other."""
    graph = parse_graph("""graph rotary {
  input %q: bf16[4, 1024, 32, 64](2097152, 2048, 64, 1)
  input %k: bf16[4, 1024, 8, 64](524288, 512, 64, 1)
  input %angle: f32[4, 1024, 64](65536, 64, 1)
  %cos: f32[4, 1024, 64](65536, 64, 1) = cos(%angle[i0, i1, i2])
  %a: bf16[4, 1024, 32, 64](2097152, 2048, 64, 1) = bf16(mul(f32(%q[i0, i1, i2, i3]), %cos[i0, i1, i3]))
  %b: bf16[4, 1024, 8, 64](524288, 512, 64, 1) = bf16(mul(f32(%k[i0, i1, i2, i3]), %cos[i0, i1, i3]))
  return %a, %b
}""")
    kernels = [s for s in plan(graph, GPU).steps if isinstance(s, Group)]
    assert len(kernels) == 2 and all(any(set(k.axes) <= m.free for m in k.members) for k in kernels)
