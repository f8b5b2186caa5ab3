"""`tokamak tune`: what is tried, what is kept, and that later compiles take it up. A made-up clock in place of a GPU's, and Triton's interpreter."""
from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import tokamak
from benchmarks import gpu_plans
from tests.test_rungs_gpu import LARGE
from tokamak.codegen.stages import schedule_plan
from tokamak.errors import TokamakError
from tokamak.fuse.cost import estimates, Hints
from tokamak.fuse.inline import inline
from tokamak.fuse.plan import plan
from tokamak.ir.parse import parse_graph
from tokamak.runtime import tuned
from tokamak.schedule.neighbours import changed, feasible, neighbours, settled
from tokamak.target import target
from tokamak.tools import trial as trials, tune as tuning
from tokamak.tools.cli import main
from tokamak.tools.record import recording

MACHINE = target("cpu", interpret=True)
SOFTMAX = lambda x: torch.softmax(x * 2, -1)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "cache"
    with tokamak.scope(cache_dir=str(path), target="interpret", strict=True):
        yield str(path)


def warps(call, schedule) -> float:
    """The more warps the better, up to 8."""
    call()
    return 1e-3 * (1 + abs(schedule.warps - 8))


def schedules(fn, *inputs, **options) -> list[str]:
    torch._dynamo.reset()
    with recording(**options) as recorder:
        got = tokamak.compile(fn, dynamic=False)(*inputs)
    torch.testing.assert_close(got, fn(*inputs), rtol=1e-4, atol=1e-4)
    return [str(p.kernel.schedule) for g in recorder.graphs for b in g.values["render"].values() for p in b.parts]


# -- neighbours ------------------------------------------------------------------------------------------------------------
BODIES = {
    "pointwise": ("input %x: f32[50, 70](70, 1)", "%y: f32[50, 70](70, 1) = exp(%x[i0, i1])"),
    "turned": ("input %x: f32[50, 70](1, 50)", "%y: f32[50, 70](70, 1) = exp(%x[i0, i1])"),
    "rows": ("input %x: f32[50, 1030](1030, 1)", "%y: f32[50](1) for i1<1030 = sum[i1](%x[i0, i1])"),
    "held": ("input %x: f32[50, 1032](1032, 1)", "%y: f32[50](1) for i1<1032 = sum[i1](%x[i0, i1])"),
    "long": ("input %x: f32[50, 9000](9000, 1)", "%y: f32[50](1) for i1<9000 = sum[i1](%x[i0, i1])"),
    "odd": ("input %x: f32[50, 1031](1031, 1)", "%y: f32[50](1) for i1<1031 = max[i1](%x[i0, i1])"),
    "columns": ("input %x: f32[700, 70](70, 1)", "%y: f32[70](1) for i1<700 = sum[i1](%x[i1, i0])"),
    "all": ("input %x: f32[70000](1)", "%y: f32[]() for i0<70000 = sum[i0](%x[i0])"),
}

ROWS = """graph rows {
  input %x: bf16[65536, 319](319, 1)
  input %y: bf16[65536, 319](319, 1)
  %sum: f32[65536](1) for i1<319 = sum[i1](mul(f32(%x[i0, i1]), f32(%y[i0, i1])))
  %out: bf16[65536, 319](319, 1) = bf16(mul(f32(%x[i0, i1]), %sum[i0]))
  return %out
}"""


def task(name: str) -> trials.Task:
    given, made = BODIES[name]
    graph = parse_graph(f"graph {name} {{\n  {given}\n  {made}\n  return %y\n}}")
    (body, schedule), = schedule_plan(plan(graph, MACHINE), MACHINE).bodies.values()
    return trials.Task(name, "", body, schedule, Hints({}), {}, MACHINE)


@pytest.mark.parametrize("name", BODIES)
def test_every_neighbour_computes_the_same(name):
    t = task(name)
    near = dict(neighbours(t.body, t.schedule, t.hints, t.target))
    assert len(near) >= 4 and t.schedule not in near.values()
    bench = trials.Bench(t)
    made = bench.build([t.schedule, *near.values()])
    want, built = bench.results(made[t.schedule]), [s for s in near.values() if s in made]
    assert not any(torch.equal(w, f) for w, f in zip(want, (f for n, f in zip(bench.nodes, bench.fresh) if n in bench.written), strict=True))
    assert len(built) > len(near) // 2
    for s in built:
        assert trials.equal(bench.results(made[s]), want), s
    for change, s in near.items():
        assert changed(t.body, t.schedule, (change,), t.hints) == s and feasible(t.body, s)


def test_blocks_of_several_pieces_are_masked_unless_they_cover_the_rows():
    """Not where only the first piece does: memory behind the rows was read."""
    t = task("columns")
    down = t.schedule.split[0]
    s = settled(t.body, replace(t.schedule, pieces=tuple((a, (16, 16) if a is down else p) for a, p in t.schedule.pieces)), t.hints)
    near = dict(neighbours(t.body, s, t.hints, t.target))
    fewer = near[f"tile(i{s.order.index(down)}:4)"]
    assert fewer.sizes(down) == (4, 4) and down not in fewer.exact
    bench = trials.Bench(t)
    made = bench.build([t.schedule, s, *near.values()])
    want = bench.results(made[t.schedule])
    assert len(made) > 4 and all(trials.equal(bench.results(x), want) for x in made.values())


def test_programs_do_not_run_through_rows_that_lie_side_by_side_and_begin_each_elsewhere():
    """Where the first one's whole words begin, those of the next rows do not: addresses were misaligned."""
    rows = plan(parse_graph(ROWS), LARGE)
    (body, schedule), = schedule_plan(rows, LARGE).bodies.values()
    assert schedule.shift is not None and schedule.order[0] in schedule.dims
    found = [c for c, _ in neighbours(body, schedule, Hints({}), LARGE)]
    assert found and not any(c.startswith("shared") for c in found) and changed(body, schedule, ("shared(i0 / 264)",), Hints({})) is None


def test_prefixes_along_a_row_that_begins_anywhere_stay_held():
    """What is before its whole words is folded at once: there is nothing that a loop would go on from."""
    rows = parse_graph("""graph rows {
      input %x: bf16[398, 8193](8193, 1)
      %y: bf16[398, 8193](8193, 1) = bf16(scan_sum[i1](f32(%x[i0, i1])))
      return %y
    }""")
    (body, schedule), = schedule_plan(plan(rows, LARGE), LARGE).bodies.values()
    assert schedule.shift is not None and not schedule.looped
    found = [c for c, _ in neighbours(body, schedule, Hints({}), LARGE)]
    assert found and not any(c.startswith("looped") for c in found) and changed(body, schedule, ("looped(i1:2048)",), Hints({})) is None


def test_dimensions_keep_an_order_of_their_own():
    """Pixels that are shuffled apart: threads go on along the first dimension, and it stays that; a new one stands before it."""
    record = gpu_plans.graphs("pixels_shuffled_bwd_f16_56x32x111x111")[-1]
    lowered = record.values["lower"]
    b, s = next((b, s) for b, s in lowered.bodies.values() if s.dims != tuple(a for a in s.order if a in s.dims))
    hints = estimates(lowered.plan.graph, LARGE)
    assert changed(b, s, ("warps(2)",), hints).dims == s.dims
    first, *_, last = s.dims
    fewer = changed(b, s, (f"tile(i{s.order.index(first)}:1)",), hints)
    assert fewer.dims == s.dims[1:] and changed(b, replace(s, dims=s.dims[::-1]), ("warps(2)",), hints).dims == s.dims[::-1]


def test_neighbours_of_neighbours_come_back():
    t = task("rows")
    kinds = {c.partition("(")[0] for c, _ in neighbours(t.body, t.schedule, t.hints, t.target)}
    assert {"warps", "looped", "shared"} <= kinds
    looped = changed(t.body, t.schedule, ("looped(i1:512)",), t.hints)
    assert looped.looped and looped.sizes(t.schedule.order[1])[0] == 512
    assert "held(i1)" in dict(neighbours(t.body, looped, t.hints, t.target))
    assert changed(t.body, looped, ("held(i1)",), t.hints) == t.schedule


def test_held_axes_in_equal_pieces():
    """Not those of rows that begin anywhere, whose first and last words are pieces of their own."""
    t = task("held")
    found = {c: s.sizes(t.schedule.order[1]) for c, s in neighbours(t.body, t.schedule, t.hints, t.target) if c.startswith("even(")}
    assert found == {"even(i1:512)": (512,) * 3, "even(i1:256)": (256,) * 5, "even(i1:128)": (128,) * 9}, found
    assert all(changed(t.body, t.schedule, (c,), t.hints) is None for c in ("even(i0:8)", "even(i1:7)", "even(i1)"))
    rows = task("rows")
    assert rows.schedule.shift is not None and changed(rows.body, rows.schedule, ("even(i1:128)",), rows.hints) is None


def test_rows_that_begin_anywhere_are_read_as_they_lie_too():
    rows = task("rows")
    alone = changed(rows.body, rows.schedule, ("shared()",), rows.hints) if rows.schedule.split else rows.schedule
    made = changed(rows.body, alone, ("unshifted()",), rows.hints)
    line = alone.shift.axis
    assert made.shift is None and sum(made.sizes(line)) >= rows.hints(line.extent)
    assert "unshifted()" in dict(neighbours(rows.body, alone, rows.hints, rows.target))
    assert changed(rows.body, made, ("unshifted()",), rows.hints) is None and changed(rows.body, made, ("even(i1:128)",), rows.hints) is not None


def test_rows_held_in_stages_have_neighbours():
    """Other numbers of programs, threads and rows under way, other pieces, run through; all are found again by their words."""
    graph = parse_graph("""graph norm {
      input %x: bf16[2000, 65536](65536, 1)
      %s: f32[2000](1) for i1<65536 = sum[i1](f32(%x[i0, i1]))
      %y: bf16[2000, 65536](65536, 1) = bf16(mul(f32(%x[i0, i1]), %s[i0]))
      return %y
    }""")
    made = plan(inline(graph, LARGE), LARGE)
    (body, schedule), = schedule_plan(made, LARGE).bodies.values()
    hints = Hints({})
    near = dict(neighbours(body, schedule, hints, LARGE))
    row, = (a for a in schedule.order if a not in body.parallel)
    assert schedule.staged is row and {c.partition("(")[0] for c in near} >= {"warps", "staged", "lanes", "looped"}
    assert all(changed(body, schedule, (c,), hints) == s for c, s in near.items())
    alone = replace(LARGE, cluster=1)
    assert not any(c.startswith("staged") for c, s in neighbours(body, schedule, hints, alone) if s.sharers > 1)
    back = f"staged(i1 / {schedule.sharers})"
    other = next(s for c, s in near.items() if c.startswith("staged"))
    assert changed(body, other, (back,), hints).sharers == schedule.sharers


@pytest.mark.parametrize("change", ["", "warps", "warps(3)", "warps(0)", "tile(i9:8)", "tile(i0:7)", "held(i0)", "looped(i0:64)", "shared(i1 / 4)",
                                    "programs(8)", "stages()", "turn(3)", "warps(i0:4)", "even(i0:8)", "__import__('os')"])
def test_words_that_are_no_change(change):
    t = task("rows")
    assert changed(t.body, t.schedule, (change,), t.hints) is None


# -- the search --------------------------------------------------------------------------------------------------------------
def test_what_is_faster_is_found_kept_and_taken_up(folder):
    x = torch.randn(10, 300)
    before = schedules(SOFTMAX, x)
    found = tokamak.tune(SOFTMAX, x, timer=warps)
    kernel, = found.kernels
    assert kernel.gain > 3 and "warps(8)" in kernel.best and [kernel.heuristic] == before and kernel.changes
    assert "warps(8)" in str(found) and folder in str(found) and kernel.name in str(found)
    assert schedules(SOFTMAX, x) == [kernel.best]
    assert schedules(SOFTMAX, x, tuned=False) == before
    assert schedules(SOFTMAX, x, cache_dir="") == before
    assert schedules(lambda x: x.sum(-1), torch.randn(10, 300)) == schedules(lambda x: x.sum(-1), torch.randn(10, 300), tuned=False)
    assert schedules(SOFTMAX, torch.randn(70, 300)) == schedules(SOFTMAX, torch.randn(70, 300), tuned=False)        # another size class


@pytest.mark.parametrize("wanted", ["softmax", "nothing"])
def test_products_of_tiles_are_not_tuned(folder, wanted):
    """What is lowered and timed of them was a loop without products, where it could be lowered at all."""
    x, q = torch.randn(16, 1024).to(torch.bfloat16), torch.randint(-9, 9, (64, 1024), dtype=torch.int8)
    product = lambda x, q: F.linear(x, q.to(x.dtype) * 0.01)
    with tokamak.scope(contractions="kernels"):
        if wanted == "nothing":
            with pytest.raises(TokamakError, match="products of tiles"):
                tokamak.tune(product, x, q, timer=warps)
            return
        kernel, = tokamak.tune(lambda x, q: torch.softmax(product(x, q).float(), -1), x, q, timer=warps).kernels
    assert "contraction" not in kernel.heuristic


def test_backward_and_what_folds_partial_results_are_kernels_too(folder):
    x, w = torch.randn(300, 64, requires_grad=True), torch.randn(64, requires_grad=True)
    found = tokamak.tune(lambda x, w: F.layer_norm(x, (64,), w), x, w, timer=warps)
    assert len(found.kernels) >= 2 and len({k.structure for k in found.kernels}) == len(found.kernels)
    torch._dynamo.reset()
    tokamak.compile(lambda x, w: F.layer_norm(x, (64,), w))(x, w).square().sum().backward()
    mine, x.grad = x.grad, None
    F.layer_norm(x, (64,), w).square().sum().backward()
    torch.testing.assert_close(mine, x.grad, rtol=1e-3, atol=1e-4)


def test_noise_is_no_gain(folder):
    turns = iter(range(10**6))
    found = tokamak.tune(SOFTMAX, torch.randn(10, 300), timer=lambda call, s: 1e-3 * (1 + 0.2 * (next(turns) % 3)))
    assert found.kernels[0].changes == () and found.kernels[0].gain == 1 and "0 of 1" in str(found)
    assert tuned.table(folder, "interpreter") == {found.kernels[0].structure: ()}           # it was timed, and stays
    with recording() as recorder:
        torch._dynamo.reset()
        tokamak.compile(SOFTMAX)(torch.randn(10, 300))
    (_, kept), = recorder.graphs[0].values["lower"].bodies.values()
    assert kept.measured and str(kept) == found.kernels[0].heuristic


def test_a_schedule_that_computes_something_else_is_not_taken(folder, monkeypatch):
    results = trials.Bench.results

    def wrong(bench, trial):
        made = results(bench, trial)
        return [m + 1 for m in made] if trial.schedule.warps == 8 else made
    monkeypatch.setattr(trials.Bench, "results", wrong)
    kernel, = tokamak.tune(SOFTMAX, torch.randn(10, 300), timer=warps).kernels
    assert "warps(8)" not in kernel.best


def test_tuning_again_finds_the_same_and_takes_out_what_no_longer_wins(folder):
    x = torch.randn(10, 300)
    assert tokamak.tune(SOFTMAX, x, timer=warps) == tokamak.tune(SOFTMAX, x, timer=warps)
    assert tuned.table(folder, "interpreter")
    tokamak.tune(SOFTMAX, x, timer=lambda call, s: 1e-3)
    assert not any(tuned.table(folder, "interpreter").values())


@pytest.mark.parametrize("dynamic", [True, None])
def test_symbolic_sizes(folder, dynamic):
    fn = torch.compile(SOFTMAX, backend="tokamak", dynamic=dynamic)
    with recording(tuned=False) as recorder:
        fn(torch.randn(10, 300))
    found = tuning.tuning(recorder, warps)
    torch._dynamo.reset()
    for columns in (300, 301, 310, 500):
        x = torch.randn(10, columns)
        torch.testing.assert_close(fn(x), SOFTMAX(x))
    assert found.kernels[0].changes


def test_indices_are_within_bounds(folder):
    found = tokamak.tune(lambda x, i: x[i] * 2, torch.randn(50, 30), torch.randint(0, 50, (70,)), timer=warps)
    assert len(found.kernels) == 1


# -- the file ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("content", [b"{", b"[]", b'{"kernels": {"a": {}}}', b'{"kernels": {"a": {"changes": [1]}}}', b"\xff\x00"])
def test_a_file_that_is_none_is_ignored_with_a_warning(folder, content):
    tuned.open_cache(folder).put(tuned._key("a"), content)
    with pytest.warns(UserWarning, match="cannot be read and are ignored"):
        assert tuned.table(folder, "a") == {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tuned.keep(folder, "a", {"k": {"changes": ["warps(4)"]}})
    assert tuned.table(folder, "a") == {"k": ("warps(4)",)} and tuned.table(folder, "b") == {}


def test_what_is_kept_grows(folder):
    tuned.keep(folder, "a", {"k": {"changes": ("warps(4)", "stages(2)")}})
    tuned.keep(folder, "a", {"l": {"changes": ("warps(8)",)}, "m": {"changes": ()}})
    assert tuned.table(folder, "a") == {"k": ("warps(4)", "stages(2)"), "l": ("warps(8)",), "m": ()}


def test_changes_that_no_longer_fit_are_left(folder):
    x = torch.randn(10, 300)
    kernel, = tokamak.tune(SOFTMAX, x, timer=warps).kernels
    tuned.keep(folder, "interpreter", {kernel.structure: {"changes": ["tile(i7:64)"]}})
    assert schedules(SOFTMAX, x) == [kernel.heuristic]


# -- the command and its refusals ----------------------------------------------------------------------------------------------
def test_tuning_is_for_gpus(tmp_path, capsys, monkeypatch):
    with pytest.raises(TokamakError, match="tuning is for GPUs"):
        tokamak.tune(SOFTMAX, torch.randn(4, 5))
    with tokamak.scope(target="interpret"), pytest.raises(TokamakError, match="the interpreter's time says nothing"):
        tokamak.tune(SOFTMAX, torch.randn(4, 5))
    script = tmp_path / "script.py"
    if not torch.cuda.is_available():
        script.write_text("print('hello')\n")
        assert main(["tune", str(script)]) == 2
        said = capsys.readouterr().err
        assert "tuning is for GPUs, and torch finds none here" in said and "hello" not in said
    script.write_text("import torch\ntorch.compile(lambda x: x * 2, backend='tokamak')(torch.ones(8))\n")
    monkeypatch.setattr("tokamak.tools.cli.refuse", lambda given: None)         # as where there is a GPU
    assert main(["tune", str(script)]) == 1
    assert "tuning is for GPUs: no kernel of this program" in capsys.readouterr().err


def test_nothing_to_tune(tmp_path, capsys, monkeypatch):
    with tokamak.scope(until="capture"), pytest.raises(TokamakError, match="tuning is for GPUs"):
        tokamak.tune(SOFTMAX, torch.randn(4, 5))
    with pytest.raises(TokamakError, match="nothing was compiled"):
        tokamak.tune(lambda: 1)
    script = tmp_path / "script.py"
    script.write_text("print(1)\n")
    monkeypatch.setattr("tokamak.tools.cli.refuse", lambda given: None)         # as where there is a GPU
    assert main(["tune", str(script)]) == 1
    assert "compiled nothing with tokamak" in capsys.readouterr().err


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu(tmp_path):
    with tokamak.scope(cache_dir=str(tmp_path / "cache"), strict=True):
        x = torch.randn(4096, 4096, device="cuda")
        found = tokamak.tune(lambda x: torch.softmax(x, -1), x)
        least = 2 * x.nbytes / 8e12             # seconds: no GPU so far moves so many bytes
        assert found.kernels and all(least < k.after <= k.before for k in found.kernels)
        torch.testing.assert_close(torch.compile(lambda x: torch.softmax(x, -1), backend="tokamak")(x), torch.softmax(x, -1))
