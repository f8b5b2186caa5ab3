"""Contractions as kernels, in Triton's interpreter: ragged, strided and empty operands, what stands in front and behind, against float64."""
from __future__ import annotations

from dataclasses import replace
from functools import reduce
from operator import add

import pytest
import torch
import torch.nn.functional as F

from tests.compiled.linear import TOLERANCE, calls, check, error, run, schedules, values, wide
from tokamak.backend import ACTIVATED, ADDED
from tokamak.fuse import contract as contracting
from tokamak.fuse.contract import contract
from tokamak.fuse.contraction import contractions
from tokamak.fuse.cost import Hints
from tokamak.fuse.price import RATES, Site, _alone
from tokamak.fuse.reason import Reason
from tokamak.fuse.vendor import sums_behind
from tokamak.ir.graph import Opaque
from tokamak.runtime import gpu_build
from tokamak.schedule.beside import BesideSchedule
from tokamak.schedule import matmul
from tokamak.schedule.matmul import MatmulSchedule, VectorSchedule
from tokamak.target import Target, target

pytest.importorskip("triton")


@pytest.mark.parametrize("rows, inner, columns", [(1, 256, 128), (3, 250, 100), (16, 64, 33), (70, 130, 150), (64, 33, 16), (129, 64, 129)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_extents(rows, inner, columns, dtype):
    fn = lambda x, w, b: F.gelu(F.linear(x, w, b))
    if rows == 1:          # a vector: its product is a fold of rows like any other
        inputs = [values(*s, dtype=dtype) for s in ((rows, inner), (columns, inner), (columns,))]
        got, (record,) = run(fn, *inputs)
        assert not calls(record) and error(got, fn(*map(wide, inputs))) <= TOLERANCE[dtype]
        return
    check(fn, *(values(*s, dtype=dtype) for s in ((rows, inner), (columns, inner), (columns,))))


BEHIND = {
    "nothing": lambda x, w, b, r: x @ w,
    "bias and relu": lambda x, w, b, r: F.relu(x @ w + b),
    "residual and scale": lambda x, w, b, r: (x @ w) * 0.5 + r,
    "a column of scales": lambda x, w, b, r: (x @ w) * r[:, :1],
    "a mask": lambda x, w, b, r: torch.where(r > 0, x @ w, 0.0),
    "transposed": lambda x, w, b, r: (x @ w).t().contiguous(),
    "alpha and beta": lambda x, w, b, r: torch.addmm(r, x, w, beta=0.5, alpha=2),
    "into a window": lambda x, w, b, r: F.pad(torch.sigmoid(x @ w), (1, 2)),
}


@pytest.mark.parametrize("name", BEHIND)
def test_what_stands_behind(name):
    torch.manual_seed(1)
    check(BEHIND[name], values(24, 40), values(40, 56), values(56), values(24, 56), kernels=2 if name == "into a window" else 1)


OPERANDS = {
    "left transposed": (lambda x, w: x.t() @ w, (40, 24), (40, 56)),
    "both transposed": (lambda x, w: x.t() @ w.t(), (40, 24), (56, 40)),
    "windows": (lambda x, w: x[::2, 3:43] @ w[:, ::3], (48, 50), (40, 96)),
    "batches": (lambda x, w: torch.bmm(x, w), (3, 20, 40), (3, 40, 24)),
    "broadcast batches": (lambda x, w: torch.matmul(x, w), (2, 1, 20, 40), (3, 40, 24)),
    "einsum": (lambda x, w: torch.einsum("bihd,bjhd->bhij", x, w), (2, 20, 3, 16), (2, 24, 3, 16)),
    "rows in two dimensions": (lambda x, w: F.linear(x, w), (3, 10, 40), (24, 40)),
    "a convolution of one element": (lambda x, w: F.conv2d(x.to(memory_format=torch.channels_last), w), (2, 40, 5, 6), (24, 40, 1, 1)),
}


@pytest.mark.parametrize("name", OPERANDS)
def test_operands(name):
    fn, *shapes = OPERANDS[name]
    got, (record,) = run(fn, *(inputs := [values(*s) for s in shapes]))
    assert error(got, fn(*map(wide, inputs))) <= TOLERANCE[torch.bfloat16] and not calls(record)
    assert any(isinstance(s, MatmulSchedule) for s in schedules(record))


@pytest.mark.parametrize("shapes", [((0, 40), (40, 24)), ((20, 40), (40, 0)), ((20, 0), (0, 24)), ((20, 1), (1, 24))])
def test_nothing_to_multiply(shapes):
    x, w = (values(*s) for s in shapes)
    got, _ = run(lambda x, w: x @ w + 1, x, w)
    torch.testing.assert_close(got, x @ w + 1)


@pytest.mark.parametrize("widths", [(64, 64, 64), (100, 250, 50), (16, 70, 128)])
def test_narrow_layers_back_to_back(widths):
    inner, hidden, columns = widths
    fn = lambda x, a, b, c, d: F.linear(F.relu(F.linear(x, a, b)), c, d)
    made, = check(fn, *(values(*s) for s in ((300, inner), (hidden, inner), (hidden,), (columns, hidden), (columns,))))
    assert made.inner is not None and made.resident


@pytest.mark.parametrize("vectors, blocks", [(2, (128, 128)), (1, (64,) * 4)])
def test_vectors_between_narrow_layers_are_as_long_as_a_program_has_threads(vectors, blocks):
    """Where there are several; a shorter one each thread would read as its part of a product has it."""
    fn = lambda x, a, m, v, c: F.linear(F.relu(F.linear(x, a) - m if vectors == 1 else (F.linear(x, a) - m) * v), c)
    made, = check(fn, *(values(*s) for s in ((300, 64), (256, 64), (256,), (256,), (100, 256))))
    assert dict(made.pieces)[made.depth] == blocks


def test_tiles_under_way_of_narrow_layers_fit_in_shared_memory():
    """Two layers of a ResNet with what batch norms and a residual put between them: vectors wait as vectors, not as whole tiles."""
    def fn(x, a, m, v, w, b, r, c):
        return F.linear(F.relu((F.linear(x, a) - m) * torch.rsqrt(v + 1e-5) * w + b + r), c)
    vectors = [values(256, dtype=torch.float32) for _ in range(4)]
    vectors[1] = vectors[1].abs()
    inputs = values(200, 64), values(256, 64), *vectors, values(200, 256), values(128, 256)
    with torch.autocast("cpu", torch.bfloat16):
        got, (record,) = run(fn, *inputs)
    assert error(got, fn(*map(wide, inputs))) <= TOLERANCE[torch.bfloat16]
    units = [part.unit for built in record.values["render"].values() for part in built.parts]
    made, = schedules(record)
    assert made.inner is not None and made.resident and len(made.sizes(made.depth)) > 1
    assert all(built.shared <= 227 << 10 for built in gpu_build.build(units, ("cuda", 90, 32)).values())


def test_a_step_of_narrow_layers():
    fn = lambda x, a, b, c, d: F.linear(F.relu(F.linear(x, a, b)), c, d)
    inputs = [values(*s).requires_grad_() for s in ((150, 32), (48, 32), (48,), (32, 48), (32,))]
    got, records = run(fn, *inputs)
    seed = torch.randn_like(got)
    got.backward(seed)
    exact = [wide(x) for x in inputs]
    want = fn(*exact)
    want.backward(seed.double())
    assert error(got, want) <= 8e-3 and all(error(x.grad, e.grad) <= 1.5e-2 for x, e in zip(inputs, exact))
    assert len(schedules(records[0])) == 1 and schedules(records[0])[0].inner is not None


def test_two_products_of_one_input_share_a_kernel():
    fn = lambda x, g, u: F.silu(x @ g) * (x @ u)
    check(fn, values(20, 40), values(40, 56), values(40, 56))


@pytest.mark.parametrize("rows", [1, 5, 20])
def test_products_of_the_same_few_rows_are_one_launch(rows):
    """Queries, keys and values, of different widths and with what stands behind each."""
    fn = lambda x, q, k, v, b: (F.relu(F.linear(x, q, b)), (F.linear(x, k) * 2).softmax(-1), F.linear(x, v).t().contiguous())
    inputs = values(rows, 72), values(70, 72), values(40, 72), values(48, 72), values(70)
    got, (record,) = run(fn, *inputs)
    assert all(error(g, w) <= 1e-2 for g, w in zip(got, fn(*map(wide, inputs)))) and not calls(record)
    made, = (s for s in schedules(record) if isinstance(s, BesideSchedule))
    assert len(made.parts) == 3 or rows == 1 and len(made.parts) == 2


def experts(x, *weights):
    """Rows of their own for each of several layers, as a loop."""
    return torch.cat([F.silu(F.linear(x[4 * n:4 * n + 4], w)) for n, w in enumerate(weights)])


def low_rank(x, w, v, a, b, c, d):
    """Two layers, each with a product of a low rank beside it."""
    return F.linear(x, w) + F.linear(F.linear(x, a), b), F.linear(x, v) * F.linear(F.linear(x, c), d)


INDEPENDENT = {
    "experts": (experts, ((20, 48), *((40, 48),) * 5), 4),
    "one expert behind another": (lambda x, v, w: (y := F.linear(x[:4], v), F.linear(x[4:] + y.sum(), w)), ((8, 48), (40, 48), (40, 48)), 1),
    "low rank": (low_rank, ((5, 64), (40, 64), (48, 64), (16, 64), (40, 16), (16, 64), (48, 16)), 2),
    "vectors": (lambda x, y, v, w: (F.linear(x, v), F.linear(y, w) * 2), ((1, 64), (1, 96), (300, 64), (200, 96)), 2),
}


@pytest.mark.parametrize("name", INDEPENDENT)
def test_small_products_that_do_not_need_each_other_are_one_launch(name):
    torch.manual_seed(3)
    """`most`: products in the largest launch."""
    fn, shapes, most = INDEPENDENT[name]
    inputs = [values(*s) for s in shapes]
    got, (record,) = run(fn, *inputs)
    want = fn(*map(wide, inputs))
    for g, w in zip(*(x if isinstance(x, tuple) else (x,) for x in (got, want))):
        assert error(g, w) <= 1.5e-2
    assert not calls(record) and max(len(s.parts) if isinstance(s, BesideSchedule) else 1 for s in schedules(record)) == most


HOPPER = Target("cuda:0", 16, 132, l1=1 << 18, l2=50 << 20, kind="gpu", arch=("cuda", 90, 32), fast=True)


@pytest.mark.parametrize("rows", [1, 8])
def test_the_vendors_products_are_added_to_what_kernels_made(rows):
    """By price: the first products of a low rank are kernels with those of the same rows, the second ones are too small."""
    shapes = (rows, 2048), (2048, 2048), (2048, 2048), (12, 2048), (2048, 12), (12, 2048), (2048, 12)
    _, (record,) = run(low_rank, *(values(*s) for s in shapes), contractions="vendor", until="inline")
    made = contract(record.values["inline"], HOPPER, "", ACTIVATED, ADDED)
    assert sum(isinstance(n, Opaque) for n in made.nodes) == 2


def test_equal_layers_have_launches_of_their_own_memory():
    """Three layers of one shape: queries, keys and values of each are one launch, and what was lowered once is right for all."""
    def fn(x, *layers):
        for q, k, v in zip(*[iter(layers)] * 3):
            x = F.relu(F.linear(x, q)) * torch.sigmoid(F.linear(x, k)) + torch.tanh(F.linear(x, v)).flip(-1)
        return x
    inputs = values(4, 48), *(values(48, 48) * 0.2 for _ in range(9))
    got, (record,) = run(fn, *inputs)
    assert error(got, fn(*map(wide, inputs))) <= 2e-2 and not calls(record)


def test_a_product_of_another_ones_result_stands_apart():
    fn = lambda x, q, k: (F.linear(x, q), F.linear(x, k + F.linear(x, q).sum() * 0.01))
    inputs = values(20, 64), values(200, 64), values(200, 64)
    got, (record,) = run(fn, *inputs)
    assert not any(isinstance(s, BesideSchedule) for s in schedules(record))
    assert all(error(g, w) <= 2e-2 for g, w in zip(got, fn(*map(wide, inputs))))


def test_many_rows_stand_apart():
    _, (record,) = run(lambda x, q, k: (x @ q, x @ k), values(100, 64), values(64, 80), values(64, 96))
    assert len(schedules(record)) == 2 and not any(isinstance(s, BesideSchedule) for s in schedules(record))


@pytest.mark.parametrize("policy", ["eager", "strict"])
def test_policies(policy):
    x, w = values(20, 64), values(64, 48)
    got, (record,) = run(lambda x, w: F.relu(x @ w) * 3, x, w, policy=policy)
    assert len(calls(record)) == (1 if policy == "strict" else 0)
    assert error(got, F.relu(x.double() @ w.double()) * 3) <= 1e-2


def test_types_that_stay_with_the_vendor():
    for dtype in (torch.float32, torch.float64):
        x, w = values(20, 40, dtype=dtype), values(40, 24, dtype=dtype)
        got, (record,) = run(lambda x, w: x @ w, x, w)
        assert "16-bit floats" in next(n.reason for n in record.values["contract"].nodes if isinstance(n, Opaque))
        torch.testing.assert_close(got, x @ w)


def test_without_a_price_contractions_stay_with_the_vendor():
    _, (record,) = run(lambda x, w: x @ w, values(20, 40), values(40, 24), contractions="vendor")
    assert len(calls(record)) == 1


@pytest.mark.parametrize("columns, depth", [(40, 3000), (1100, 96), (2100, 40)])
def test_a_matrix_and_a_vector(columns, depth):
    x, w, b = values(1, depth), values(columns, depth), values(columns)
    fn = lambda x, w, b: F.gelu(F.linear(x, w, b))
    got, (record,) = run(fn, x, w, b)
    assert error(got, fn(*map(wide, (x, w, b)))) <= 8e-3
    assert [type(s) for s in schedules(record)] == [VectorSchedule] and schedules(record)[0].once


def normed(x, g, b, u, d):
    """A norm, the layer behind it, and one behind that."""
    h = F.rms_norm(x, x.shape[-1:], g)
    return F.linear(F.silu(F.linear(h, u)) * F.linear(h, b), d)


def layers(width, hidden, scale=1.0):
    return values(1, width), values(width), values(hidden, width) * scale, values(hidden, width) * scale, values(width, hidden) * scale


@pytest.mark.parametrize("policy", ["fast", "eager"])
def test_a_norm_in_front_of_products_with_a_vector(policy):
    inputs = layers(96, 300, 0.2)
    got, (record,) = run(normed, *inputs, policy=policy)
    assert error(got, normed(*map(wide, inputs))) <= 1e-2 and not calls(record)


def test_the_scale_of_a_norm_stands_in_the_products_with_its_row():
    """Four kernels: the norm's sum; both products of the normed row, and what is made of them; the last product, which takes in nothing, and does not
    fold its own results for the sum behind it."""
    fn = lambda *inputs: (y := normed(*inputs), y.float().square().sum(-1))
    _, (record,) = run(fn, *layers(1024, 2048), until="lower")
    assert [isinstance(s, VectorSchedule) for s in schedules(record)] == [False, True, True, False]


FRONTS = {
    "a sum": (lambda x, y, w: F.linear(x + y, w), 1),
    "of which there is a result": (lambda x, y, w: (F.linear(x * y, w), x * y), 2),
    "work": (lambda x, y, w: F.linear(torch.tanh(x) * torch.sin(y) + torch.exp(x), w), 2),
    "another product": (lambda x, y, w: F.linear(F.linear(x, w) + y, w), 2),
}


@pytest.mark.parametrize("name", FRONTS)
def test_what_stands_in_front_of_a_vector(name):
    """Computed again by every program of its product, or not."""
    fn, kernels = FRONTS[name]
    inputs = values(1, 144), values(1, 144), values(144, 144) * 0.1
    got, (record,) = run(fn, *inputs)
    want = fn(*map(wide, inputs))
    assert all(error(g, w) <= 1e-2 for g, w in (zip(got, want) if isinstance(got, tuple) else [(got, want)])) and not calls(record)
    _, (record,) = run(fn, values(1, 1024), values(1, 1024), values(1024, 1024), until="lower")
    assert len(schedules(record)) == kernels and isinstance(schedules(record)[-1], VectorSchedule)


@pytest.mark.parametrize("rows, columns, tile", [(5, 120, (16, 256)), (5, 130, (64, 128)), (20, 250, (64, 128)), (5, 300, (64, 64))])
def test_tiles_of_few_rows_fill_the_machine(rows, columns, tile):
    """Of four multiprocessors."""
    x, w, b = values(rows, 9000), values(columns, 9000), values(columns)
    made, = check(lambda x, w, b: F.relu(F.linear(x, w, b)), x, w, b)
    assert tile == made.sizes(made.dims[0]) + made.sizes(made.depth)


@pytest.mark.parametrize("rows, columns, tile", [(5, 300, (64, 128)), (20, 300, (64, 64)), (20, 250, (64, 128)), (40, 90, (64, 128)),
                                                 (40, 100, (32, 128))])
def test_tiles_of_two_products_leave_room_for_steps(rows, columns, tile):
    """Of four multiprocessors."""
    made, = check(lambda x, g, u: F.silu(F.linear(x, g)) * F.linear(x, u), values(rows, 512), values(columns, 512), values(columns, 512))
    assert tile == made.sizes(made.dims[0]) + made.sizes(made.depth)


def test_what_few_rows_are_multiplied_by_leaves_the_cache_first_where_one_program_reads_it():
    """Many rows' tiles read it more than once; so does each batch that shares it."""
    linear = lambda x, w: F.linear(x, w)
    few, = check(linear, values(5, 600), values(180, 600))
    many, = check(linear, values(100, 600), values(180, 600))
    own, = check(lambda x, w: torch.bmm(x, w.mT), values(3, 5, 600), values(3, 180, 600))
    shared, = check(lambda x, w: torch.bmm(x.transpose(0, 1), w.mT.expand(3, 600, 180)), values(5, 3, 600), values(180, 600))
    assert few.once and own.once and not many.once and not shared.once


def test_a_vector_in_a_fixed_order_is_a_fold_like_any_other():
    got, (record,) = run(lambda x, w: (x.float() * w.float()).sum(-1), values(1, 96), values(40, 96), policy="strict")
    assert not any(isinstance(s, MatmulSchedule) for s in schedules(record))


def test_slices_of_the_depth():
    """Few columns: several slices of the depth at once, the last step of which may lack some."""
    for depth in (768, 640 + 256):
        x, w, b = values(5, depth), values(48, depth), values(48)
        made, = check(lambda x, w, b: F.relu(F.linear(x, w, b)), x, w, b)
        assert made.outer is not None and made.early


OF_A_CLUSTER = {
    "relu": lambda x, w, b, r: F.relu(F.linear(x, w, b)), "residual": lambda x, w, b, r: F.gelu(F.linear(x, w, b)) + r,
    "column": lambda x, w, b, r: F.linear(x, w) * r[:, :1], "turned": lambda x, w, b, r: torch.tanh(F.linear(x, w)).t().contiguous(),
}


@pytest.mark.parametrize("name", OF_A_CLUSTER)
@pytest.mark.parametrize("rows, columns, depth, sharers, dtype", [(40, 64, 4096, 4, torch.bfloat16), (64, 61, 4100, 4, torch.float16),
                                                                  (33, 120, 2176, 2, torch.bfloat16)])
def test_programs_of_a_cluster_share_the_depth(name, rows, columns, depth, sharers, dtype):
    """Each has a part of the tile that they have added up, and what stands behind the product there."""
    shapes = (rows, depth), (columns, depth), (columns,), (rows, columns)
    made, = check(OF_A_CLUSTER[name], *(values(*shape, dtype=dtype) for shape in shapes))
    assert made.programs == made.sharers == sharers and f"cluster({sharers})" in str(made)


def test_two_products_share_the_depth_of_a_cluster():
    made, = check(lambda x, g, u: F.silu(F.linear(x, g)) * F.linear(x, u), values(33, 2050), values(50, 2050), values(50, 2050))
    assert made.sharers == 2


def test_what_no_cluster_shares_is_added_up_by_a_kernel():
    """Other numbers than clusters have, and two clusters of four, which eight multiprocessors do not run at once."""
    for columns, threads, found in ((128, 6, (3, 1)), (64, 5, (5, 1)), (64, 4, (4, 4)), (128, 8, (4, 1)), (128, 4, (2, 2))):
        _, (record,) = run(lambda x, w: F.linear(x, w), values(40, 8192), values(columns, 8192), until="schedule")
        (body, _), = record.values["schedule"].bodies.values()
        _, made = matmul.choose(body, Hints({}), replace(target("cpu", interpret=True), threads=threads))
        assert (made.programs, made.sharers) == found


def test_a_relu_behind_a_bias_is_ours_on_a_gpu():
    """What is no number stays so."""
    fn = lambda x, w, b: F.relu(F.linear(x, w, b))
    x, w, b = values(100, 64), values(32, 64), values(32)
    x[3] = float("nan")
    got, (record,) = run(fn, x, w, b, contractions="vendor")
    assert calls(record) == ["aten.addmm.default"] and len(schedules(record)) == 1
    torch.testing.assert_close(got, fn(x, w, b), rtol=2e-2, atol=2e-2, equal_nan=True)


@pytest.mark.parametrize("fn", [lambda x, w, b: (y := F.linear(x, w, b), F.relu(y)), lambda x, w, b: F.relu(F.linear(x, w, b)).t().contiguous(),
                                lambda x, w, b: F.relu(torch.addmm(b, x, w.t(), beta=2)), lambda x, w, b: F.relu(F.linear(x, w, b) - 1)])
def test_what_is_no_relu_behind_a_bias_stays(fn):
    inputs = values(20, 16), values(24, 16), values(24)
    got, (record,) = run(fn, *inputs, contractions="vendor")
    assert calls(record) == ["aten.addmm.default"] and len(schedules(record)) == 1
    for g, w in zip(got if isinstance(got, tuple) else (got,), (fn(*map(wide, inputs)) if isinstance(got, tuple) else (fn(*map(wide, inputs)),))):
        assert error(g, w) <= 8e-3


def test_weights_that_do_not_lie_along_the_depth_stay_with_the_vendor():
    """By prices: 16 rows by 1024 x 1024, which is a kernel where the weights lie along the depth."""
    hints, rates = Hints({}), RATES["cuda", 90]
    found = []
    for fn, shape in ((lambda x, w: x @ w.t(), (1024, 1024)), (lambda x, w: x @ w, (1024, 1024))):
        _, (record,) = run(fn, values(16, 1024), values(*shape), contractions="vendor", until="contract")
        graph = record.values["contract"]
        site = Site(graph, contractions(graph), {}, {}, frozenset())
        found += [_alone(site, n, c, hints, rates) for n, c in site.found.items()]
    assert found[0] is None and "contiguous along the depth" in found[1].detail


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("lay", ["a linear layer", "columns of x apart", "no rows"])
def test_a_relu_behind_a_linear_layer_on_a_cpu(dtype, lay):
    x, w, b = (values(*s, dtype=dtype) for s in ((0 if lay == "no rows" else 20, 48), (40, 48), (40,)))
    x = x.t().contiguous().t() if lay == "columns of x apart" else x
    fn = lambda x, w, b: F.relu(F.linear(x, w, b))
    got, (record,) = run(fn, x, w, b, target="", contractions="")
    assert lay == "no rows" or len(calls(record)) == 1 and "activated_on_cpu" in calls(record)[0] and not schedules(record)
    assert got.shape == (len(x), 40) and got.stride() == fn(x, w, b).stride()
    assert error(got, fn(*map(wide, (x, w, b)))) <= {torch.bfloat16: 8e-3, torch.float32: 1e-6, torch.float64: 1e-12}[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_number_stays_none_behind_a_linear_layer_on_a_cpu(dtype):
    x, w, b = (values(*s, dtype=dtype) for s in ((20, 48), (40, 48), (40,)))
    x[3, 5], x[4, 6] = torch.nan, torch.inf
    fn = lambda x, w, b: F.relu(F.linear(x, w, b))
    got, _ = run(fn, x, w, b, target="", contractions="")
    assert torch.equal(got.isnan(), fn(x, w, b).isnan()) and torch.equal(got[4], fn(x, w, b)[4])


@pytest.mark.parametrize("pairs", [2, 3, 4])
def test_products_that_are_no_contractions_are_what_the_vendor_adds_to(pairs):
    """Of all but one of the products in a sum, the vendor adds to that one; and each is added once."""
    fn = lambda *x: reduce(add, (left @ right for left, right in zip(x[::2], x[1::2])))
    inputs = [values(*((32, 12 + n) if side == 0 else (12 + n, 40)), dtype=torch.float32) for n in range(pairs) for side in (0, 1)]
    _, (record,) = run(fn, *inputs, until="inline")
    graph = record.values["inline"]
    *others, apart = contractions(graph)
    found = sums_behind(graph, ADDED, others)
    assert list(found) == others and found[others[0]].kept.node.opaque is apart
    assert [x.kept for x in found.values()][1:] == others[:-1]


@pytest.mark.parametrize("kernels", [{0}, {1}, {2}, {0, 1}, {1, 2}, {0, 2}], ids=str)
def test_sums_of_products_of_which_some_are_kernels(monkeypatch, kernels):
    """Whatever the prices of single products say."""
    torch.manual_seed(6)
    asked = contracting.unprofitable

    def some(site, hints, machine):
        depths = sorted({hints(c.depth.extent) for c in site.found.values()})
        reasons = asked(site, hints, machine)
        return {n: None if depths.index(hints(c.depth.extent)) in kernels else reasons[n] or Reason("vendor", "not attempted", "as asked")
                for n, c in site.found.items()}
    monkeypatch.setattr(contracting, "unprofitable", some)
    fn = lambda a, b, c, u, v, w: a @ u + b @ v + c @ w
    inputs = [values(*s) for s in ((24, 32), (24, 40), (24, 48), (32, 56), (40, 56), (48, 56))]
    got, (record,) = run(fn, *inputs, contractions="")
    assert error(got, fn(*map(wide, inputs))) <= TOLERANCE[torch.bfloat16]
    assert len(calls(record)) == 3 - len(kernels)
