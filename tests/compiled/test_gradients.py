"""Gradients of linear layers as kernels, in Triton's interpreter: sums of a factor beside the product that reads it, against float64."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import tokamak
from tests.compiled.linear import TOLERANCE, calls, error, run, schedules, values, wide
from tests.cubins import dumped
from tokamak import backend
from tokamak.capture import aot
from tokamak.codegen.stages import parts, schedule_plan
from tokamak.fuse.plan import plan
from tokamak.ir.graph import Opaque, View
from tokamak.ir.parse import parse_graph
from tokamak.runtime import gpu_build
from tokamak.schedule.beside import BesideSchedule
from tokamak.schedule.matmul import MatmulSchedule, sums_beside
from tokamak.schedule.persistent import PersistentSchedule
from tokamak.schedule.rows import RowsSchedule
from tokamak.target import Target
from tokamak.tools.record import recording
from tokamak.trace import Stopped

pytest.importorskip("triton")


def bodies(record) -> list:
    """The bodies of the kernels that have sums beside a contraction, in its own way or row by row."""
    made = record.values["lower"].bodies.values()
    return [b for b, s in made if isinstance(s, RowsSchedule) or isinstance(s, MatmulSchedule) and sums_beside(b)]


BESIDE = {
    "columns of the left": lambda x, g: (g.t() @ x, g.sum(0)),
    "columns of the right": lambda x, g: (x.t() @ g, g.sum(0)),
    "both": lambda x, g: (x.t() @ g, g.sum(0), x.sum(0)),
    "what is made of them": lambda x, g: (x.t() @ g, torch.tanh(g.sum(0) * 0.1) + 1),
    "in f32": lambda x, g: (x.t() @ g, g.sum(0, dtype=torch.float32)),
    "transposed": lambda x, g: (g.t() @ x.t().contiguous().t(), g.sum(0)),
    "read with the product": lambda x, g: (torch.relu(g.t() @ x) * g.sum(0)[:, None],),
    "kept along": lambda x, g: (g.t() @ x, g.sum(0, keepdim=True)),
}


@pytest.mark.parametrize("rows, first, second", [(2500, 64, 48), (130, 33, 150), (2100, 200, 17)])
@pytest.mark.parametrize("name", BESIDE)
def test_sums_of_a_factor_beside_a_product(name, rows, first, second):
    torch.manual_seed(rows)
    inputs = values(rows, first), values(rows, second)
    got, (record,) = run(BESIDE[name], *inputs)
    for g, w in zip(got, BESIDE[name](*map(wide, inputs)), strict=True):
        assert g.shape == w.shape and error(g, w) <= TOLERANCE[torch.bfloat16]
    assert not calls(record) and len(bodies(record)) == 1


@pytest.mark.parametrize("shapes", [((0, 40), (0, 24)), ((1, 40), (1, 24)), ((20, 1), (20, 24))])
def test_few_or_no_rows(shapes):
    fn = BESIDE["both"]
    inputs = [values(*s) for s in shapes]
    got, _ = run(fn, *inputs)
    for g, w in zip(got, fn(*map(wide, inputs)), strict=True):
        assert g.shape == w.shape and error(g, w) <= TOLERANCE[torch.bfloat16]


def test_a_number_summed_over_rows_beside_a_product():
    """A gradient that is the same number everywhere: it has no axis to be asked for."""
    inputs = values(130, 33), values(130, 40), values(1)[0]
    got, _ = run(lambda x, g, c: (x.t() @ g, c.expand(130, 40).sum(0)), *inputs, contractions="")
    x, g, c = map(wide, inputs)
    for g, w in zip(got, (x.t() @ g, (130 * c).expand(40)), strict=True):
        assert g.shape == w.shape and error(g, w) <= TOLERANCE[torch.bfloat16]


OTHERS = {
    "a sum of other values": lambda x, g: (g.t() @ x, (g.float() * 3).sum(0)),
    "a sum along another axis": lambda x, g: (g.t() @ x, g.sum(1)),
    "a maximum": lambda x, g: (g.t() @ x, g.amax(0)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_stands_apart(name):
    inputs = values(200, 160), values(200, 140)
    got, (record,) = run(OTHERS[name], *inputs)
    want = OTHERS[name](*map(wide, inputs))
    for g, w in zip(got, want, strict=True):
        assert g.shape == w.shape and error(g, w) <= TOLERANCE[torch.bfloat16]
    assert not bodies(record)


def step(fn, inputs, **options):
    """Checks result and gradients of `fn` against float64; gives the records of its graphs."""
    torch._dynamo.reset()
    torch.manual_seed(2)
    options = {"target": "interpret", "strict": True, "dynamic": False, "cache_dir": "", "contractions": "kernels", **options}
    with recording() as recorder:
        got = tokamak.compile(fn, **options)(*inputs)
        gradient = values(*got.shape, dtype=got.dtype)
        found = torch.autograd.grad(got, inputs, gradient)
    exact, plain = [wide(i) for i in inputs], torch.autograd.grad(fn(*inputs), inputs, gradient)
    for g, e, w in zip(found, plain, torch.autograd.grad(fn(*exact), exact, gradient.double()), strict=True):
        assert g.shape == w.shape and error(g, w) <= max(1.5 * error(e, w), 1e-2)
    return recorder.graphs


def narrow(record) -> list:
    return [s for s in schedules(record) if isinstance(s, RowsSchedule)]


def layers(rows, inner, hidden, out, dtype=torch.bfloat16):
    return [values(*s, dtype=dtype).div(3).requires_grad_() for s in ((rows, inner), (hidden, inner), (hidden,), (out, hidden), (out,))]


BETWEEN = {"relu": F.relu, "gelu": F.gelu, "scaled": lambda h: torch.sigmoid(h) * 2 + 1, "swish": F.silu}


@pytest.mark.parametrize("rows, inner, hidden, out", [(300, 64, 64, 64), (1000, 48, 33, 20), (129, 17, 128, 5), (200, 128, 64, 64)])
@pytest.mark.parametrize("between", BETWEEN)
def test_a_step_of_narrow_layers(between, rows, inner, hidden, out):
    fn = lambda x, w, b, v, c: F.linear(BETWEEN[between](F.linear(x, w, b)), v, c)
    (backward,) = [r for r in step(fn, layers(rows, inner, hidden, out)) if r.kind == "backward"]
    assert not calls(backward) and len(narrow(backward)) == 1
    assert len(schedules(backward)) == 1 or inner == 128        # a wide layer's rows and weights may not find room beside each other


def test_what_programs_carry_is_added_up_by_one_kernel():
    """Two layers' weights and biases, four sums of what the programs leave, are a launch."""
    fn = lambda x, w, b, v, c: F.linear(F.relu(F.linear(x, w, b)), v, c)
    (backward,) = [r for r in step(fn, layers(1000, 64, 48, 64)) if r.kind == "backward"]
    (made,) = backward.values["render"].values()
    rows, sums = (p.kernel.schedule for p in made.parts)
    assert isinstance(rows, RowsSchedule) and isinstance(sums, BesideSchedule) and len(sums.parts) == 4


@pytest.mark.parametrize("residual", [True, False])
def test_what_is_multiplied_and_added_is_read_for_each(residual):
    """Triton's pipeline has a slot too few for a load that products read from shared memory while it is added in registers: on an H200 sums over
    100003 rows lost 4%. What is added is in registers a block ahead. Sums of a factor are products with ones, and stay in the pipeline."""
    fn = lambda x, w, b, v, c: F.linear(F.silu(F.linear(x, w, b)), v, c) + (x if residual else 0)
    (backward,) = [r for r in step(fn, layers(1100, 64, 64, 64)) if r.kind == "backward"]
    texts = [p.unit.text for b in backward.values["render"].values() for p in b.parts if "narrow" in str(p.kernel.schedule)]
    assert texts and all(s.stages > 1 for s in narrow(backward)) and all(("tl.minimum" in t) == residual for t in texts)


@pytest.mark.parametrize("shape", [(6, 50, 48), (2, 3, 64, 48)])
def test_rows_in_several_dimensions_are_rows(shape):
    fn = lambda x, w, b, v, c: F.linear(F.relu(F.linear(x, w, b)), v, c)
    inputs = [values(*shape).div(3).requires_grad_(), *layers(1, 48, 40, 33)[1:]]
    (backward,) = [r for r in step(fn, inputs) if r.kind == "backward"]
    assert not calls(backward) and len(narrow(backward)) == len(schedules(backward)) == 1


def test_rows_that_are_not_gone_through_in_step_stand_apart():
    by = torch.linspace(0.5, 1, 50, dtype=torch.bfloat16)[None, :, None]
    fn = lambda x, w, b, v, c: F.linear(F.relu(F.linear(x, w, b)) * by, v, c)
    inputs = [values(6, 50, 48).div(3).requires_grad_(), *layers(1, 48, 40, 33)[1:]]
    (backward,) = [r for r in step(fn, inputs) if r.kind == "backward"]
    assert not calls(backward) and not any("loop_tree" in str(d.reason) for d in backward.values["lower"].plan.decisions)


def test_pointwise_and_sums_of_columns_alone_are_no_narrow_layers():
    fn = lambda x, g: ((y := torch.where(x > 0, g, 0.0)), y.sum(0))
    inputs = values(3000, 64), values(3000, 64)
    got, (record,) = run(fn, *inputs)
    for g, w in zip(got, fn(*map(wide, inputs)), strict=True):
        assert error(g, w) <= TOLERANCE[torch.bfloat16]
    assert not narrow(record)


def test_what_does_not_fit_stands_apart():
    """Gradients of weights that no program can carry beside each other."""
    fn = lambda x, w, b, v, c: F.linear(F.relu(F.linear(x, w, b)), v, c)
    (backward,) = [r for r in step(fn, layers(300, 128, 128, 128)) if r.kind == "backward"]
    assert not calls(backward) and len(schedules(backward)) > 1


@pytest.mark.parametrize("between", [F.relu, torch.tanh])
@pytest.mark.parametrize("rows, widths, dtype", [(300, (128, 256, 128), torch.bfloat16), (320, (128, 256, 128), torch.float16),
                                                 (290, (100, 200, 120), torch.bfloat16), (310, (128, 224, 104), torch.float16)])
def test_gradients_that_two_programs_carry(between, rows, widths, dtype):
    """Each has half of the hidden axis; what lies between the layers is made by the kernel of the rows too, and stored by neither."""
    fn = lambda x, w, b, v, c: F.linear(between(F.linear(x, w, b)), v, c)
    (backward,) = [r for r in step(fn, layers(rows, *widths, dtype)) if r.kind == "backward"]
    pair, *turned = sorted(narrow(backward), key=lambda s: s.half is None)
    assert not calls(backward) and pair.half is not None and pair.turned and len(turned) == (between is not F.relu) and all(s.turned for s in turned)
    if between is F.relu:           # a mask waits in few registers, and rows are taken 128 at a time
        tall, = (s for s in schedules(backward) if getattr(s, "inner", None) is not None)
        assert tall.sizes(tall.dims[0]) == (128,) and tall.sizes(tall.depth) == (128, 128)
    stored = {tuple(n.shape) for n, places in backward.values["lower"].plan.stores.items() for n in places}
    assert not any(s[-1].constant == widths[1] and s[0].constant == rows for s in stored if len(s) == 2)
    texts = [b.parts[0].unit.text for b in backward.values["render"].values()]
    assert len(texts) == 2 and all("tk.in_pairs(" in t for t in texts)          # what is rounded between two products


def test_widths_that_leave_a_quarter_of_the_tiles_empty_go_in_blocks():
    """Of 64 columns, some fewer: no two programs share the hidden axis."""
    fn = lambda x, w, b, v, c: F.linear(F.relu(F.linear(x, w, b)), v, c)
    (backward,) = [r for r in step(fn, layers(300, 96, 192, 96)) if r.kind == "backward"]
    assert not calls(backward) and not any(s.half is not None for s in narrow(backward))


def test_a_gradient_of_other_values_reads_what_lies_between():
    """The second layer's weights are multiplied by the hidden values, which those of the first have no need of: a kernel more would read them."""
    fn = lambda x, w, b, v, c: F.linear(F.silu(F.linear(x, w, b)), v, c)
    (backward,) = [r for r in step(fn, layers(300, 128, 256, 128)) if r.kind == "backward"]
    assert not calls(backward) and not narrow(backward)


def test_what_only_weights_need_is_made_once():
    """No gradient of the rows is asked for."""
    fn = lambda x, w, b, v, c: F.linear(F.relu(F.linear(x, w, b)), v, c)
    torch.manual_seed(3)
    x, *weights = layers(300, 128, 256, 128)
    (backward,) = [r for r in step(lambda *w: fn(x.detach().to(w[0].dtype), *w), weights) if r.kind == "backward"]
    made = [n for n in backward.values["contract"].nodes if getattr(n, "tag", 0) >= 2000]
    assert not made and not calls(backward) and any(s.half is not None for s in narrow(backward))


def test_sums_over_rows_of_what_is_computed():
    """The gradients of a norm's weights, in front of two layers that read it, are sums of no factor of a product."""
    fn = lambda x, g, s, w, b, v, c: torch.sigmoid(F.linear(h := F.layer_norm(x, (48,), g, s), w, b)) * F.linear(h, v, c)
    x, w, b, v, c = layers(1100, 48, 48, 48)
    (backward,) = [r for r in step(fn, [x, *(values(48).requires_grad_() for _ in range(2)), w, b, v, c]) if r.kind == "backward"]
    assert not calls(backward) and narrow(backward)


STEPS = {
    "one layer": (3, lambda x, w, b: F.linear(x, w, b)),
    "no biases": (4, lambda x, w, b, v: F.linear(F.relu(F.linear(x, w)), v) * b.sum()),
    "three layers": (5, lambda x, w, b, v, c: F.linear(F.relu(F.linear(F.relu(F.linear(x, w, b)), v, c)), w, b)),
    "a residual": (5, lambda x, w, b, v, c: F.linear(F.relu(F.linear(x, w, b)), v, c) + x),
    "a norm in front": (5, lambda x, w, b, v, c: F.linear(F.relu(F.linear(F.layer_norm(x, (48,)), w, b)), v, c)),
    "rows in two dimensions": (5, lambda x, w, b, v, c: F.linear(F.relu(F.linear(x.view(10, -1, 48), w, b)), v, c)),
    "a transposed input": (5, lambda x, w, b, v, c: F.linear(F.relu(F.linear(x.t().contiguous().t(), w, b)), v, c)),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_steps(name, dtype):
    count, fn = STEPS[name]
    step(fn, layers(310, 48, 40, 48, dtype)[:count])


def test_the_gradients_of_one_narrow_layer_are_one_kernel():
    fn = lambda x, w, b, g: torch.autograd.grad(F.linear(x, w, b), (x, w, b), g)
    inputs = [values(*s).requires_grad_() for s in ((700, 48), (64, 48), (64,))] + [values(700, 64)]
    got, (record,) = run(lambda g, x, w: (g @ w, g.t() @ x, g.sum(0)), inputs[3].detach(), inputs[0].detach(), inputs[1].detach())
    for g, w in zip(got, fn(*(wide(i) for i in inputs)), strict=True):
        assert error(g, w) <= TOLERANCE[torch.bfloat16]
    assert len(narrow(record)) == len(schedules(record)) == 1


@pytest.mark.parametrize("inner, hidden", [(128, 256), (128, 128), (256, 128)])
@pytest.mark.parametrize("between", BETWEEN)
def test_layers_back_to_back_in_turned_tiles(between, inner, hidden):
    """Forward, with and without the values that a backward needs."""
    fn = lambda x, w, b, v, c: F.linear(BETWEEN[between](F.linear(x, w, b)), v, c)
    inputs = layers(150, inner, hidden, 128)
    (forward,) = [r for r in step(fn, inputs) if r.kind == "forward"]
    assert any(s.turned for s in narrow(forward)) is (hidden == 256)
    with torch.no_grad():
        got, (record,) = run(fn, *inputs)
        assert error(got, fn(*map(wide, inputs))) <= TOLERANCE[torch.bfloat16]
    assert any(s.turned for s in narrow(record)) is (hidden == 256)


def lone_gradient(rows: int):
    """The schedule of the gradient of a layer's weights, of 128 to 256, by itself, on an H200."""
    graph = parse_graph(f"""graph gradient {{
      input %g: bf16[{rows}, 256](256, 1)
      input %x: bf16[{rows}, 128](128, 1)
      %w: f32[256, 128](128, 1) for i2<{rows} = sum[i2](mul(f32(%g[i2, i0]), f32(%x[i2, i1])))
      return %w
    }}""")
    return alone(graph)


def alone(graph, **more):
    """The schedule of a graph's only kernel on an H200."""
    (_, s), = schedule_plan(plan(graph, machine(**more)), machine(**more)).bodies.values()
    return s


def machine(**more) -> Target:
    return Target("cpu", 16, 132, l1=1 << 18, l2=50 << 20, kind="gpu", arch=("cuda", 90, 32), cluster=8, **more)


@pytest.mark.parametrize("rows, shared", [(131072, True), (256, False)])
def test_a_lone_gradient_of_weights_is_shared_by_many_programs(rows, shared):
    """Few tiles of a long depth are no work for programs that make tile after tile."""
    s = lone_gradient(rows)
    assert isinstance(s, PersistentSchedule) is not shared and (s.programs > 8) is shared


def test_products_in_tf32_that_addresses_do_not_make_stay():
    graph = parse_graph("""graph gradient {
      input %g: f32[256, 131072](131072, 1)
      input %x: f32[128, 131072](131072, 1)
      %w: f32[256, 128](128, 1) for i2<131072 = sum[i2](mul(tf32(%g[i0, i2]), tf32(%x[i1, i2])))
      return %w
    }""")
    assert isinstance(alone(graph, tf32=True), PersistentSchedule)


@pytest.mark.parametrize("rows, far", [(1 << 20, False), (1 << 24, True)])
def test_offsets_of_products_are_wide_where_memory_is(rows, far):
    """However many coordinates rows, columns and depth have together, no address is made of them."""
    s = lone_gradient(rows)
    assert s.wide is far


def chosen(fn, shapes) -> dict:
    """kind -> (calls, what is lowered, columns of rows' values that are kept or given out) of a step's graphs, by prices, on an H200."""
    found = {}

    def one(graph, inputs, kind):
        def stop(stage, value):
            if stage == "lower":
                plan = value.plan
                rows = {v.node.shape[1].constant for v in plan.graph.outputs if isinstance(v, View) and v.node.shape[0].constant == shapes[0][0]}
                found[kind] = [s for s in plan.steps if isinstance(s, Opaque)], value, rows
                raise Stopped
            return value
        with pytest.raises(Stopped):
            backend.compile_graph(graph, inputs, tokamak.Options(target="interpret"), stop, kind)
        return aot.eager(graph)
    torch._dynamo.reset()
    again = backend._made_again(lambda device: True)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        inputs = [torch.empty(s, dtype=torch.bfloat16, requires_grad=True) for s in shapes]
        out = torch.compile(fn, backend=lambda gm, i: aot.autograd(gm, i, one, again=again), dynamic=False)(*inputs)
        torch.autograd.grad(out, inputs, torch.empty_like(out))
    return found


def two_layers(between, rows, inner, hidden, columns):
    shapes = (rows, inner), (hidden, inner), (hidden,), (columns, hidden), (columns,)
    return chosen(lambda x, w, b, v, c: F.linear(between(F.linear(x, w, b)), v, c), shapes)


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(backend, "target", lambda *_, **__: machine())


@pytest.mark.parametrize("between", [F.relu, F.silu, F.gelu])
def test_training_of_layers_of_64_columns_is_a_kernel_each_way(between, hopper):
    """Forward keeps no hidden values: 71 us a step of 262144 rows, 95 and more where it does."""
    found = two_layers(between, 262144, 64, 48, 56)
    assert all(not calls_ and len(low.bodies) == 1 for calls_, low, _ in found.values()) and 48 not in found["forward"][2]
    ((_, s),) = found["backward"][1].bodies.values()
    assert isinstance(s, RowsSchedule) and s.half is None


def test_two_programs_leave_the_gradient_that_the_vendor_multiplies_by(hopper):
    """Forward keeps no hidden values; backward stores the gradient of those that stand between the layers, which nothing makes again."""
    found = two_layers(F.relu, 131072, 128, 256, 128)
    assert not found["forward"][0] and 256 not in found["forward"][2]
    (call,), low, _ = found["backward"]
    ((_, s),) = low.bodies.values()
    assert "made again" in str(call.reason) and s.half is not None and s.turned


def test_rows_of_no_whole_words_keep_what_lies_between(hopper):
    assert 60 in two_layers(F.relu, 131072, 60, 60, 60)["forward"][2]
    assert 250 in two_layers(F.relu, 131072, 128, 250, 128)["forward"][2]


@pytest.mark.parametrize("widths", [(64, 64, 64), (128, 256, 128)])
def test_products_of_a_block_of_rows_are_under_way_together(widths, hopper):
    """NVIDIA's assembler, in doubt, has each wait for the one before."""
    _, low, _ = two_layers(F.relu, 131072, *widths)["backward"]
    (made,) = low.kernels.values()
    unit = parts(made)[0].unit
    built = gpu_build.build([unit], ("cuda", 90, 32))[unit.name]
    said = dumped(built.code, "-sass")
    assert said.count("HGMMA") > 20 and said.count("WARPGROUP.DEPBAR") < said.count("HGMMA") / 2 and built.spilled == 0
