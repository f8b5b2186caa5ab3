"""Contractions of many rows and columns by programs that stay, in Triton's interpreter: what descriptors can and cannot read, parts of tiles,
batches, several products, what stands behind them, memory that is not aligned; against float64. And their kernels compiled for a GPU that is not
there."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import tokamak
from tests.large_gpu import LARGE
from tokamak.codegen.stages import lower_plan, parts, render_plan, schedule_plan
from tokamak.codegen.triton_listing import listing
from tokamak.fuse.plan import plan
from tokamak.ir.parse import parse_graph
from tokamak.runtime import gpu_build
from tokamak.schedule.persistent import PersistentSchedule
from tokamak.target import tf32_allowed

from .test_contractions import TOLERANCE, error, run, schedules, values, wide

pytest.importorskip("triton")


def kernels(record) -> list:
    return [part.kernel for built in record.values["render"].values() for part in built.parts]


def persistent(fn, *inputs, **options):
    """The one kernel of `fn`, by programs that stay, which gives what float64 gives."""
    got, (record, *_) = run(fn, *inputs, **options)
    assert error(got, fn(*map(wide, inputs))) <= TOLERANCE[got.dtype]
    made, = kernels(record)
    assert isinstance(made.schedule, PersistentSchedule)
    return made


@pytest.mark.parametrize("rows, inner, columns", [(70, 136, 152), (129, 64, 136), (65, 8, 72), (200, 72, 264)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_extents(rows, inner, columns, dtype):
    inputs = [values(*s, dtype=dtype) for s in ((rows, inner), (columns, inner), (columns,))]
    made = persistent(lambda x, w, b: F.gelu(F.linear(x, w, b)), *inputs)
    assert len(made.boxes) == (3 if made.schedule.last == 1 else 6) and made.otherwise is not None
    assert all(f"    {b.name}, " in listing(made, "product", {}) for b in made.boxes)


def test_tiles_in_parts():
    inputs = [values(*s) for s in ((390, 72), (72, 520), (520,), (390, 520))]
    made = persistent(lambda x, w, b, r: F.silu(x @ w + b) * r[:, :1] + r, *inputs)
    assert made.schedule.parts == 2 and made.schedule.flat


@pytest.mark.parametrize("inner", [64, 24])
def test_tiles_in_parts_of_one_step_along_the_depth(inner):
    """Tiles are counted whole, whatever a part of one has: beyond the results, what stands behind would be read outside memory."""
    inputs = [values(*s) for s in ((390, inner), (inner, 520), (390, 520))]
    made = persistent(lambda x, w, r: F.silu(x @ w) + r, *inputs)
    counts = {p.source.constant for p in made.params if p.kind == "int"}
    assert made.schedule.parts == 2 and 4 * 3 in counts and 4 * 5 not in counts


ROUNDS = {          # of four programs: rows, columns -> into how many a tile of the last round is cut
    "one of nine is left": ((380, 520), 4), "two of six": ((380, 264), 2), "three of three": ((380, 152), 1), "four of four": ((500, 152), 1),
}


@pytest.mark.parametrize("name", ROUNDS)
def test_the_last_round_is_shared(name):
    (rows, columns), cut = ROUNDS[name]
    inputs = [values(*s) for s in ((rows, 72), (columns, 72), (columns,), (rows, columns))]
    made = persistent(lambda x, w, b, r: F.gelu(F.linear(x, w, b)) * r[:, :1] + r, *inputs)
    assert made.schedule.last == cut and made.schedule.resident == 4 and str(made.schedule).endswith(f"last(1 / {cut})") == (cut > 1)


def test_the_last_round_of_a_pair_and_of_batches():
    fn = lambda x, g, u: F.silu(F.linear(x, g)) * F.linear(x, u)
    assert persistent(fn, values(140, 72), values(310, 72), values(310, 72)).schedule.last == 2
    assert persistent(lambda x, w: F.relu(torch.bmm(x, w)), values(3, 190, 40), values(3, 40, 200)).schedule.last == 2


def test_the_last_round_of_sizes_that_change():
    """The kernel was made where a tile in nine is left; then none is, then there are fewer tiles than programs."""
    torch._dynamo.reset()
    fn = lambda x, w: F.relu(F.linear(x, w))
    made = tokamak.compile(fn, dynamic=True, target="interpret", contractions="kernels")
    for rows in (380, 500, 100, 390):
        x, w = values(rows, 72), values(520, 72)
        assert error(made(x, w), fn(wide(x), wide(w))) <= TOLERANCE[torch.bfloat16]


OPERANDS = {
    "left transposed": (lambda x, w: x.t() @ w, (72, 80), (72, 96), 3),
    "both transposed": (lambda x, w: x.t() @ w.t(), (72, 80), (96, 72), 3),
    "windows": (lambda x, w: x[:, 8:80] @ w[:, 16:112], (80, 96), (72, 128), 3),
    "a window that begins anywhere": (lambda x, w: x[:, 3:75] @ w, (80, 96), (72, 80), 2),
    "a step between columns": (lambda x, w: x @ w[:, ::2], (80, 72), (72, 160), 2),
    "columns that are no whole words": (lambda x, w: x @ w, (80, 72), (72, 99), 1),
    "a transposed result": (lambda x, w: (x @ w).t().contiguous(), (80, 72), (72, 96), 3),
    "batches": (lambda x, w: torch.bmm(x, w), (3, 80, 40), (3, 40, 72), 3),
    "heads": (lambda x, w: torch.einsum("bihd,bjhd->bhij", x, w), (2, 72, 3, 16), (2, 80, 3, 16), 3),
    "a factor that a kernel in front computes": (lambda x, w: torch.relu(x) @ w, (80, 72), (72, 96), 3),
}


@pytest.mark.parametrize("name", OPERANDS)
def test_operands(name):
    fn, left, right, boxes = OPERANDS[name]
    got, (record,) = run(fn, *(inputs := (values(*left), values(*right))))
    assert error(got, fn(*map(wide, inputs))) <= TOLERANCE[torch.bfloat16]
    found = [k for k in kernels(record) if isinstance(k.schedule, PersistentSchedule)]
    assert len(found) == 1 and len(found[0].boxes) == boxes


BEHIND = {
    "a gate of two products": lambda x, g, u, r: F.silu(x @ g) * (x @ u),
    "three products": lambda x, g, u, r: (x @ g) * (x @ u) + x @ (g + u),
    "a mask": lambda x, g, u, r: torch.where(r > 0, x @ g, 0.0),
    "scales of rows and columns": lambda x, g, u, r: (x @ g) * r[:, :1] * r[0],
    "two results": lambda x, g, u, r: torch.stack([torch.relu(x @ g), r]).sum(0),
    "a wider result": lambda x, g, u, r: (x @ g).float() * 3,
    "alpha and beta": lambda x, g, u, r: torch.addmm(r, x, g, beta=0.5, alpha=2),
}


@pytest.mark.parametrize("name", BEHIND)
def test_what_stands_behind(name):
    fn = BEHIND[name]
    inputs = [values(*s) for s in ((136, 72), (72, 136), (72, 136), (136, 136))]
    got, (record,) = run(fn, *inputs)
    assert error(got, fn(*map(wide, inputs))) <= 1.5e-2
    assert any(isinstance(s, PersistentSchedule) for s in schedules(record))


PAIRS = {               # gate and up as a user may hold them: apart, the other way round in memory, in one tensor
    "apart": lambda a: (a[:152 * 72].view(152, 72), a[156 * 72:308 * 72].view(152, 72)),
    "turned round": lambda a: (a[156 * 72:308 * 72].view(152, 72), a[:152 * 72].view(152, 72)),
    "one of which begins anywhere": lambda a: (a[:152 * 72].view(152, 72), a[156 * 72 + 1:308 * 72 + 1].view(152, 72)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_two_products_of_one_factor_are_one(name):
    fn = lambda x, g, u: F.silu(F.linear(x, g)) * F.linear(x, u) - F.linear(x, g)
    made = persistent(fn, values(140, 72), *PAIRS[name](values(310 * 72)))
    assert made.schedule.paired and not made.otherwise.boxes
    rounds = 1 if made.schedule.last == 1 else 2
    assert [b.block[0] for b in made.boxes if b.beside is not None] == [2] * rounds and len(made.boxes) == 3 * rounds


def test_two_parts_of_one_tensor():
    fn = lambda x, w: F.gelu(F.linear(x, w[152:])) * F.linear(x, w[:152])
    assert persistent(fn, values(140, 72), values(304, 72)).schedule.paired


def test_pairs_that_one_descriptor_does_not_hold():
    """Weights that are contiguous along the columns, and two left factors."""
    fn = lambda x, y, g, u: F.silu(x @ g) * (x @ u)
    assert not persistent(fn, *(values(*s) for s in ((140, 72), (140, 72), (72, 152), (72, 152)))).schedule.paired
    fn = lambda x, y, g, u: F.silu(F.linear(x, g)) * F.linear(y, u)
    _, (record,) = run(fn, *(values(*s) for s in ((140, 72), (140, 72), (152, 72), (152, 72))))
    assert not any(k.schedule.paired for k in kernels(record) if isinstance(k.schedule, PersistentSchedule))


@pytest.fixture
def tf32():
    """TF32 is allowed."""
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision("highest")


def test_float32_where_tf32_is_allowed(tf32):
    inputs = [values(*s, dtype=torch.float32) for s in ((140, 40), (264, 40), (264,), (140, 264))]
    fn = lambda x, w, b, r: F.gelu(F.linear(x, w, b)) + r
    got, (record,) = run(fn, *inputs)
    want = fn(*map(wide, inputs))
    made, = kernels(record)
    assert isinstance(made.schedule, PersistentSchedule) and float((got.double() - want).norm() / want.norm()) < 1e-3
    assert [b.rounds for b in made.boxes][:3] == [True, True, False] and "descriptor of 128 x 32 tf32" in listing(made, "product", {})
    unit = parts((made,))[0].unit
    built = gpu_build.build([unit], ("cuda", 90, 32))[unit.name]
    assert "f32.tf32.tf32" in built.listing and [m[1] for m in built.maps][:3] == [11, 11, 7]


def test_tf32_of_memory_that_is_not_aligned(tf32):
    flat, w = values(130 * 72 + 1, dtype=torch.float32), values(136, 72, dtype=torch.float32)
    x = flat[1:].view(130, 72)
    got, (record,) = run(lambda x, w: F.relu(F.linear(x, w)), x, w)
    assert kernels(record)[0].boxes and error(got, F.relu(F.linear(wide(x), wide(w)))) < 1e-3


def test_a_pair_in_tf32(tf32):
    inputs = [values(*s, dtype=torch.float32) for s in ((140, 72), (152, 72), (152, 72))]
    fn = lambda x, g, u: F.silu(F.linear(x, g)) * F.linear(x, u)
    got, (record,) = run(fn, *inputs)
    made, = kernels(record)
    assert made.schedule.paired and [b.rounds for b in made.boxes][:3] == [True, True, False] and error(got, fn(*map(wide, inputs))) < 1e-3


@pytest.mark.parametrize("name, fn, rows", [("columns first", lambda x, w: x @ w, 140), ("few rows", lambda x, w: F.linear(x, w.t()), 16)])
def test_what_stays_with_the_vendor_in_tf32(tf32, name, fn, rows):
    inputs = values(rows, 72, dtype=torch.float32), values(72, 152, dtype=torch.float32)
    got, (record,) = run(fn, *inputs)
    assert not any(isinstance(s, PersistentSchedule) for s in schedules(record)) and error(got, fn(*map(wide, inputs))) < 1e-5


def test_both_ways_to_allow_tf32():
    asked = torch.backends.cuda.matmul
    before = torch.get_float32_matmul_precision()
    try:
        for allow in (lambda: setattr(asked, "allow_tf32", True), lambda: setattr(asked, "fp32_precision", "tf32")):
            torch.set_float32_matmul_precision("highest")
            assert not tf32_allowed()
            allow()
            assert tf32_allowed()
    finally:
        torch.set_float32_matmul_precision(before)


def test_float32_stays_float32():
    fn = lambda x, w: F.relu(F.linear(x, w))
    _, (record,) = run(fn, values(140, 72, dtype=torch.float32), values(152, 72, dtype=torch.float32))
    assert not any(isinstance(s, PersistentSchedule) for s in schedules(record))


def test_sums_that_are_no_calls_stay_float32(tf32):
    """TF32 is for torch's products; what a user adds up is added up."""
    x, y = values(130, 24, dtype=torch.float32), values(140, 24, dtype=torch.float32)
    got, _ = run(lambda x, y: (x[:, None] * y[None]).sum(-1), x, y)
    assert error(got, (wide(x)[:, None] * wide(y)[None]).sum(-1)) < 1e-6


def test_memory_that_is_not_aligned():
    """The same kernel by addresses serves calls whose memory the copy engine cannot read."""
    flat = values(80 * 72 + 1)
    w = values(72, 80)
    got, (record,) = run(lambda x, w: F.relu(x @ w), flat[1:].view(80, 72), w)
    assert error(got, F.relu(wide(flat[1:].view(80, 72)) @ wide(w))) <= TOLERANCE[torch.bfloat16]
    made, = kernels(record)
    assert made.boxes and not made.otherwise.boxes


def test_sizes_that_change():
    torch._dynamo.reset()
    fn = lambda x, w: F.relu(x @ w)
    got, _ = run(fn, x := values(80, 72), w := values(72, 96), dynamic=True)
    assert error(got, fn(wide(x), wide(w))) <= TOLERANCE[torch.bfloat16]


def test_a_depth_that_is_not_empty_is_said_to_be_none():
    """Then Triton makes no second kernel for an empty one, with all that stands behind the products. The interpreter holds us to it."""
    fn = lambda x, w, r: F.silu(x[:, 8:] @ w[8:]) + r
    inputs = lambda depth: (values(390, depth), values(depth, 520), values(390, 520))
    _, (record, *_) = run(fn, *inputs(80))
    (unit,) = (part.unit for built in record.values["render"].values() for part in built.parts)
    assert "flatten=True" in unit.text and "tl.assume(" in unit.text
    behind = [gpu_build.build([u], ("cuda", 90, 32))[u.name].listing for u in (unit, told_nothing(unit))]
    assert len(set(map(len, behind))) == 2 and len(behind[0]) < len(behind[1])
    torch._dynamo.reset()
    made = tokamak.compile(fn, dynamic=True, target="interpret", contractions="kernels", strict=True, cache_dir="")
    for depth in (80, 72, 8, 16):               # 8: an empty one
        given = inputs(depth)
        assert error(made(*given), fn(*map(wide, given))) <= TOLERANCE[torch.bfloat16]


def told_nothing(unit):
    """The same without what Triton may assume."""
    text = "\n".join(line for line in unit.text.split("\n") if "tl.assume(" not in line)
    return replace(unit, name=unit.name[:-1] + "x", text=text.replace(unit.name, unit.name[:-1] + "x"))


def test_a_pair_compiles_to_one_product():
    """Both factors stand side by side in shared memory, where products of twice the columns read them."""
    made = persistent(lambda x, g, u: F.silu(F.linear(x, g)) * F.linear(x, u), values(136, 136), values(136, 136), values(136, 136))
    unit = parts((made,))[0].unit
    built = gpu_build.build([unit], ("cuda", 90, 32))[unit.name]
    assert "m64n256k16" in built.listing and not built.spilled and built.shared <= 227 << 10


BESIDE = {          # what a large tile has in shared memory beside its steps -> how many of these are under way
    "its result": (lambda x, w, b, r: F.gelu(x @ w + b), 4), "a residual": (lambda x, w, b, r: x @ w + r, 3),
    "random numbers": (lambda x, w, b, r: F.dropout(F.relu(x @ w + b), 0.1), 3), "a wider result": (lambda x, w, b, r: (x @ w).float() * 3, 3),
}


@pytest.mark.parametrize("name", BESIDE)
def test_steps_under_way_of_large_tiles_fit_in_shared_memory(name):
    fn, stages = BESIDE[name]
    _, (record,) = run(fn, *(values(*s) for s in ((260, 72), (72, 520), (520,), (260, 520))))
    made, = (k for k in kernels(record) if isinstance(k.schedule, PersistentSchedule))
    unit = parts((made,))[0].unit
    built = gpu_build.build([unit], ("cuda", 90, 32))[unit.name]
    assert made.schedule.flat and made.schedule.stages == stages and not built.spilled and built.shared <= 227 << 10


@pytest.mark.parametrize("factor", ["f32(bf16(%w[i1, i2]))", "f32(bf16(mul(%w[i1, i2], %w[i1, i2])))"])
def test_steps_under_way_of_factors_that_are_not_copied_fit_in_shared_memory(factor):
    """They are under way as they lie in memory: twice as wide as they are multiplied, and once more as they are multiplied."""
    graph = parse_graph(f"""graph logits {{
  input %x: bf16[4096, 1024](1024, 1)
  input %w: f32[50257, 1024](1024, 1)
  %y: bf16[4096, 50257](50264, 1) for i2<1024 = bf16~(sum[i2](mul(f32(%x[i0, i2]), {factor})))
  return %y
}}""")
    lowered = lower_plan(schedule_plan(plan(graph, LARGE), LARGE), LARGE)
    (made,), = (built.parts for built in render_plan(lowered).values())
    built = gpu_build.build([made.unit], ("cuda", 90, 32))[made.unit.name]
    assert isinstance(made.kernel.schedule, PersistentSchedule) and made.kernel.schedule.boxes and built.shared <= 227 << 10


@pytest.mark.parametrize("arch", [("cuda", 90, 32), ("cuda", 80, 32), ("hip", "gfx942", 64)], ids=str)
def test_they_compile(arch):
    """For sm_90 with descriptors; by addresses for the others."""
    made = persistent(lambda x, w, b: F.gelu(x @ w + b), values(136, 72), values(72, 136), values(136))
    unit = parts((made if arch[1] == 90 else made.otherwise,))[0].unit
    built = gpu_build.build([unit], arch)[unit.name]
    assert ("cp.async.bulk.tensor" in built.listing) == (arch[1] == 90) and built.shared <= 227 << 10
