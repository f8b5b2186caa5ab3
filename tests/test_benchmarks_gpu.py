"""What of the GPU benchmark needs no GPU: names, limits, every case's function against float64 at small sizes, the runner, the report."""
from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

from benchmarks import (
    gpu_choice, gpu, gpu_drawn, gpu_few, gpu_grid, gpu_host, gpu_models, gpu_models_worker, gpu_plot, gpu_products, gpu_report, gpu_run, gpu_sides,
    gpu_worker)
from benchmarks.gpu_case import shrunk
from benchmarks.gpu_cases import BEYOND, CONTRACTIONS, MORE, NAMES, case, chosen
from benchmarks.gpu_measure import Span, Times, cut, errors, right, span, summary
from tokamak.runtime import build

LIMITS = [line.split() for line in (Path(__file__).parent / "gpu_limits.txt").read_text().splitlines() if not line.startswith("#")]
RUN = {"device": "none", "torch": "0", "triton": "0", "copy": 4e12, "matmul": 7e14}
GOOD = {"device": 1e-3, "wall": 1e-3, "kernels": 1, "first": 0.1, "peak": 0, "error": 0.0, "peak_error": 0.0, "right": True, "names": []}
BLOCK = "bias_dropout_add_ln"


def untimed(fn) -> Times:
    fn()
    return Times(1e-3, 2e-3, 1, (("kernel", 1e-3),))


def kinds() -> list[str]:
    """A name for each family, direction and dtype."""
    return list({(c.family, c.mode, c.dtype, c.specs[0].layout): n for n in reversed(NAMES + MORE + CONTRACTIONS) if (c := case(n))}.values())


# -- cases -------------------------------------------------------------------------------------------------------------------
def test_the_names_are_the_list():
    assert {name for _, name, _ in LIMITS} == set(NAMES) and len(set(NAMES)) == len(NAMES) == 131
    assert not set(MORE + CONTRACTIONS) & set(NAMES)


@pytest.mark.parametrize("group, name, limit", LIMITS, ids=lambda x: None)
def test_limits_and_groups(group, name, limit):
    found = case(name).limit(4.26e12, 694e12) * 1e6
    assert case(name).group == group
    assert found == pytest.approx(float(limit), rel=0.01, abs=0.05)       # 0.05: the table's last digit


@pytest.mark.parametrize("name", kinds())
def test_every_function_equals_float64(name):
    small = shrunk(case(name))
    inputs = small.inputs("cpu")
    found = gpu_sides.measure(small, "eager", inputs, gpu_sides.reference(small, inputs, 0), untimed)
    assert found["right"], found


@pytest.mark.parametrize("name", ["layernorm_bwd_bf16_64x65", "batchnorm_bf16_nhwc_4x8x5x6", f"{BLOCK}_bwd_f16_64x128", "amax_argmax_bf16_8x33"])
def test_a_compiled_side(name):
    small = case(name)
    inputs = small.inputs("cpu")
    found = gpu_sides.measure(small, "tokamak", inputs, gpu_sides.reference(small, inputs, 0), untimed)
    assert found["right"] and found["first"] > 0, found


def test_layouts_and_sizes():
    x = case("batchnorm_bf16_nhwc_2x6x4x5").inputs("cpu")[0]
    assert x.shape == (2, 6, 4, 5) and x.is_contiguous(memory_format=torch.channels_last)
    assert case("softmax_f16_3x5").bytes == 2 * 3 * 5 * 2 and case("sum_all_f32_2Ki").specs[0].shape == (2048,)
    assert shrunk(case("softmax_bf16_65472x1025")).sizes == (31, 33)


@pytest.mark.parametrize("name", ["layernorm_bf16", "layernorm_bf16_4", "layernorm_bf16_4x4x4", "nothing_bf16_4x4", "softmax_i8_4x4",
                                  "softmax_bf16_nchw_4x4", "batchnorm_bf16_4x4x4x4", "softmax_bf16_x4"])
def test_names_that_say_no_case(name):
    with pytest.raises(ValueError):
        case(name)


def test_choosing():
    assert chosen([], []) == list(NAMES)
    assert all(n.startswith("softmax") for n in chosen(["softmax_*"], []))
    assert chosen(["softmax_bf16_7x9"], []) == ["softmax_bf16_7x9"]
    assert chosen([], ["loss"]) == [name for g, name, _ in sorted(LIMITS, key=lambda r: NAMES.index(r[1])) if g == "loss"]
    assert all(set(chosen([], [group])) == set(names) for group, names in BEYOND.items())
    with pytest.raises(ValueError):
        chosen(["nothing*"], [])


def test_grids():
    made = gpu_grid.names("softmax", ("bf16", "f32"), (-1, 0, 1), rows=(1024, 2048), columns=(1024, 1024), elements=(1, 1 << 30))
    assert made == [f"softmax_{d}_{r}x{c}" for d in ("bf16", "f32") for r in (1024, 2048) for c in (1023, 1024, 1025)]
    for grid in gpu_grid.GRIDS.keys() - {"gemm"}:
        for name in gpu_grid.names(grid, near=(-1, 1)):
            assert (1 << 20) <= torch.Size(s := case(name).sizes).numel() + s[0] <= (1 << 27) + 2 * s[0]
    products = gpu_grid.names("gemm", rows=(64, 128))
    assert len(products) == 2 * 16 * 6 and case(products[0]).group == "gemm" and case(products[0]).flops == 2 * 64 * 1024 * 1024
    hidden = gpu_grid.names("hidden", near=(0,))
    assert {case(n).sizes[1] for n in hidden} == {c for sizes in gpu_grid.HIDDEN.values() for c in sizes}


def test_choices_are_scored():
    sizes = gpu_choice.names((256, 512), (1024,), ("scale", "res"), "bf16", 1)
    assert sorted(sizes) == sorted(f"linear_{b}_bf16_{m}x1024x1024" for b in ("scale", "res") for m in (256, 512)) and all(map(case, sizes))
    wrong = gpu_choice.Line("x", {"kernels": 9e-6, "vendor": 10e-6}, {"kernels": 12e-6, "vendor": 10e-6}, "kernels")
    fine = gpu_choice.Line("y", {"kernels": 9e-6, "vendor": 10e-6}, {"kernels": 8e-6, "vendor": 10e-6}, "kernels")
    assert wrong.loss == pytest.approx(0.2) and fine.loss == 0 and "loses 20.0%" in str(wrong)
    assert "2 sizes: choices lose 10.00%, at most 20.0%" in gpu_choice.summary([wrong, fine])


# -- right or wrong ----------------------------------------------------------------------------------------------------------
def test_errors():
    reference = torch.randn(64, 64, dtype=torch.float64)
    assert errors(reference.float(), reference)[0] < 1e-7
    one_row = reference.clone()
    one_row[5] = 0
    assert not right(errors(one_row.bfloat16(), reference), torch.bfloat16)
    tall = torch.randn(1 << 14, 4, dtype=torch.float64)
    lost = tall.clone()
    lost[77] = 0                                        # one row of many: the norm alone would not see it
    found = errors(lost, tall)
    assert found[0] < 2e-2 and not right(found, torch.bfloat16)
    assert not right(errors(reference * float("nan"), reference), torch.bfloat16)
    assert not right(errors([reference, torch.tensor(float("nan"))], [reference, torch.tensor(1.0).double()]), torch.bfloat16)
    assert errors(torch.tensor([1, 2]), torch.tensor([1, 3]))[0] == float("inf")
    assert errors([reference], [reference, reference])[0] == float("inf")


def test_wrong_values_are_found():
    small = shrunk(case("softmax_bf16_16384x4097"))
    inputs = small.inputs("cpu")
    expected = gpu_sides.reference(small, inputs, 0)
    wrong = replace(small, recipe=replace(small.recipe, fn=lambda x: torch.softmax(x[:, :-1], -1).new_zeros(x.shape)))
    assert not gpu_sides.measure(wrong, "eager", inputs, expected, untimed)["right"]


def test_state_that_spoils_a_later_call_is_found():
    small = shrunk(case("sum_inner_f32_1024x65536"))
    calls = []

    def forgetful(x):
        calls.append(1)
        return x.sum(1) * (1 if len(calls) < 3 else 2)
    inputs = small.inputs("cpu")
    expected = gpu_sides.reference(small, inputs, 0)
    later = replace(small, recipe=replace(small.recipe, fn=forgetful))
    assert not gpu_sides.measure(later, "eager", inputs, expected, untimed)["right"]


@pytest.mark.parametrize("p", (0.0, 0.3))
@pytest.mark.parametrize("direction", ("", "_bwd"))
def test_dropout_of_another_share_is_found(p, direction):
    from benchmarks.gpu_families import _dropout_block
    one = case(f"{BLOCK}{direction}_f16_128x256")
    inputs = one.inputs("cpu")
    expected = gpu_sides.reference(one, inputs, 0)
    assert gpu_sides.measure(one, "eager", inputs, expected, untimed)["right"]
    other = replace(one, recipe=replace(one.recipe, fn=_dropout_block(p)))
    assert not gpu_sides.measure(other, "eager", inputs, expected, untimed)["right"]


# -- times -------------------------------------------------------------------------------------------------------------------
def test_calls_are_cut_at_the_flush():
    spans = [Span("before", 0, 9), Span("flush", 1, 50), Span("a", 2, 10), Span("b", 3, 20), Span("flush", 4, 50), Span("a", 5, 12), Span("b", 6, 20),
             Span("flush", 7, 50), Span("a", 8, 30), Span("a", 9, 30)]
    calls = cut(spans, "flush")
    assert [[s.name for s in c] for c in calls] == [["a", "b"], ["a", "b"], ["a", "a"]]
    times = summary(calls, 1.0)
    assert times.device == pytest.approx(32e-9) and times.kernels == 2 and times.names == (("b", pytest.approx(20e-9)), ("a", pytest.approx(12e-9)))


def test_what_runs_on_the_host_is_no_span():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.randn(8).sum()
    events = profiler.events()
    assert events and not any(map(span, events))
    events[0].device_type = torch.autograd.DeviceType.CUDA
    found = span(events[0])
    assert found.name == events[0].name and found.duration == pytest.approx(events[0].time_range.elapsed_us() * 1000, abs=1)


# -- runs --------------------------------------------------------------------------------------------------------------------
def fake(log: list, fail: tuple = (), die: tuple = ()):
    """A worker that needs no device: every side takes 1 ms; `fail` are recorded as errors, at `die` it ends early."""
    def worker(todo, rates):
        log.append([n for n, _ in todo])
        yield {"ready": {**RUN, **(rates or {})}}
        for name, sides in todo:
            yield {"begin": name, "side": "reference"}
            for side in sides:
                yield {"begin": name, "side": side}
                if (name, side) in die:
                    yield {"failed": "the process ended with signal 11"}
                    return
                error = {"failed": "RuntimeError: no", "at": "x.py:1"}
                yield {"case": name, "side": side, "result": error if (name, side) in fail else GOOD}
        yield {"end": True}
    return worker


SOME = ["softmax_bf16_65536x1024", "rmsnorm_bf16_65536x1024", "sum_all_f32_128Mi"]


def test_a_run_resumes(tmp_path):
    path = str(tmp_path / "r.json")
    log: list = []
    results = gpu_run.Results.open(path)
    assert gpu_run.run(results, results.missing(SOME[:2], ("eager", "tokamak")), fake(log, fail=((SOME[0], "tokamak"),)))
    again = gpu_run.Results.open(path)
    assert again.rows == results.rows and again.rows[SOME[0]]["tokamak"]["failed"] and again.rows[SOME[1]]["tokamak"]["percent"] > 0
    todo = again.missing(SOME, ("eager", "tokamak"))
    assert todo == [(SOME[2], ("eager", "tokamak"))]
    assert gpu_run.run(again, todo, fake(log)) and log == [SOME[:2], SOME[2:]]
    assert again.missing(SOME, ("eager", "tokamak")) == []
    assert again.missing(SOME[:1], ("eager", "tokamak"), ("tokamak",)) == [(SOME[0], ("tokamak",))]
    assert json.loads(Path(path).read_text())["rows"].keys() == set(SOME) and os.listdir(tmp_path) == ["r.json"]


def test_a_worker_that_dies_costs_one_side():
    results = gpu_run.Results("", [], {})
    log: list = []
    assert gpu_run.run(results, results.missing(SOME, ("eager", "tokamak")), fake(log, die=((SOME[1], "eager"),)))
    assert log == [SOME, SOME[1:]]
    assert "signal 11" in results.rows[SOME[1]]["eager"]["failed"] and "device" in results.rows[SOME[1]]["tokamak"] and len(results.rows) == 3


def test_a_worker_that_cannot_begin_stops_the_run():
    with pytest.raises(RuntimeError, match="no such device"):
        gpu_run.run(gpu_run.Results("", [], {}), [(SOME[0], ("eager",))], lambda *_: (m for m in [{"failed": "exit 1", "words": ["no such device"]}]))


def test_the_budget_stops_before_a_case():
    ticks = iter(range(0, 10000, 10))
    results = gpu_run.Results("", [], {})
    assert not gpu_run.run(results, results.missing(SOME, ("eager",)), fake([]), budget=100, clock=lambda: next(ticks))
    assert 0 < len(results.rows) < 3


def test_a_process_that_hangs_or_crashes_is_noticed():
    head = "import sys, os, time, json; job = json.loads(sys.stdin.readline()); out = os.fdopen(int(sys.argv[1]), 'w', 1); " \
           "print(json.dumps({'begin': 'a', 'side': 'eager'}), file=out); "
    for body, why in (("time.sleep(60)", "no answer"), ("print('broken', file=sys.stderr); sys.exit(4)", "exit code 4: broken"),
                      ("os.fork() or time.sleep(30); os.kill(os.getpid(), 11)", "signal 11")):
        worker = gpu_run.process(("eager",), 1, 0, 3.0, command=(sys.executable, "-c", head + body))
        messages = list(worker([("a", ("eager",))], None))
        assert messages[0] == {"begin": "a", "side": "eager"} and why in messages[1]["failed"]


def test_the_worker_goes_on_after_a_side_that_raises(monkeypatch):
    real = gpu_sides.compiled
    monkeypatch.setattr(gpu_sides, "compiled", lambda side, fn, **more: (lambda *_: 1 / 0) if side == "inductor" else real("eager", fn))
    said: list = []
    gpu_worker.work([("softmax_bf16_8x9", ("eager", "inductor", "tokamak")), ("sum_all_f32_64", ("eager",))], said.append, untimed, "cpu")
    results = [(m["case"], m["side"], m["result"]) for m in said if "case" in m]
    assert [r[1] for r in results] == ["eager", "inductor", "tokamak", "eager"]
    assert results[1][2]["failed"].startswith("ZeroDivisionError") and results[2][2]["right"] and results[3][2]["right"]


# -- whole models ------------------------------------------------------------------------------------------------------------
def _net(share: float):
    def build(dropout: bool, layers: int | None):
        drop = torch.nn.Dropout(share if dropout else 0.0)
        layer = torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU()
        return torch.nn.Sequential(*layer, drop, torch.nn.Flatten(), torch.nn.Linear(288, 10))
    return build


@pytest.mark.parametrize("mode, drops", [("infer", False), ("train", False), ("train", True)])
def test_a_model_is_measured(monkeypatch, tmp_path, mode, drops):
    monkeypatch.setitem(gpu_models.MODELS, "net", gpu_models_worker.Model(_net(drops / 2), (4, 3, 8, 8), 10, channels_last=True, dropout=drops))
    row = {}
    for side, parts in gpu_models.WANTED.items():
        said: list = []
        if side != "inductor":
            gpu_models_worker.serve("net", mode, side, parts, "cpu", 1, str(tmp_path), str(tmp_path / "lock"), said.append)
            assert said.pop() == {"end": True} and [m["part"] for m in said] == list(parts)
        for message in said:
            gpu_models.enter(row.setdefault(side, {}), message)
    assert all(gpu_models.PARTS[p] in r and "failures" not in r for side, r in row.items() for p in gpu_models.WANTED[side]), row
    assert row["floor"]["first"] > 0 and row["tokamak"]["right"], row
    assert row["tokamak"]["planned"] > 0 and row["tokamak"]["opaque"]["convolution.default"] >= 1
    assert "tokamak" in gpu_models.line("net", mode, row) and list((tmp_path / "tokamak").iterdir())


def test_a_cold_compile_says_where_its_seconds_went(monkeypatch):
    monkeypatch.setattr(build, "_LOADED", {})           # of the kernels, which other tests have too
    torch._dynamo.reset()
    found = gpu_models_worker.planned(gpu_models_worker.Model(_net(0.0), (4, 3, 8, 8), 10), "infer", "cpu", {"cache_dir": ""})
    assert found["stages"].keys() >= {"capture", "fuse", "lower", "build"} and all(s >= 0 for s in found["stages"].values())
    times = [seconds for seconds, _, _ in found["slowest"]]
    assert times == sorted(times, reverse=True) and 0 < len(times) <= gpu_models_worker.SLOWEST
    text = gpu_models.line("net", "infer", {"tokamak": found})
    assert f"slowest {found['slowest'][0][1]}" in text and f"{max(found['stages'], key=found['stages'].get)} " in text


def test_what_is_missing_of_the_models():
    args = gpu_models.arguments(["--models", "llama_1b_1x1", "vit_b16_64", "--modes", "infer"])
    results = gpu_run.Results("", [], {"llama_1b_1x1 infer": {"eager": {"wall": 1.0}, "floor": {"failures": {"first": {}}},
                                                              "tokamak": {"first": 1.0}}})
    left = gpu_models.missing(args, results)
    assert [j[2:] for j in left if j[0] == "llama_1b_1x1"] == [("floor", ["first"]), ("inductor", ["first", "step"]),
                                                               ("tokamak", ["step", "right", "plan"])]
    assert len(left) == 7


@pytest.mark.parametrize("parts, discarded", [(["first", "step"], [("llama_1b_1x1", "floor", ["first"])]), (["step"], [])])
def test_first_calls_are_made_one_behind_the_other(monkeypatch, parts, discarded):
    """The first one counts for nothing, and no process starts before what another is to time first is timed."""
    said, at_once, most, both = [], 0, 0, threading.Barrier(2)

    def spoken(command, job, patience):
        nonlocal at_once, most
        said.append((job["name"], job["side"], job["parts"]))
        at_once += 1
        most = max(most, at_once)
        if discarded:
            time.sleep(0.05)
        else:
            both.wait(60)
        at_once -= 1
        yield from ({"part": p, "result": {gpu_models.PARTS[p]: 1.0, "device": 1.0, "peak": 1, "kernels": 1}} for p in job["parts"])
        yield {"end": True}
    monkeypatch.setattr(gpu_models, "spoken", spoken)
    results, todo = gpu_run.Results("", [], {}), [("llama_1b_1x1", "infer", side, parts) for side in ("inductor", "tokamak")]
    assert gpu_models.measured(gpu_models.arguments(["--jobs", "3"]), results, todo) == [True, True]
    assert said[:len(discarded)] == discarded and len(said) == len(discarded) + 2 and (most == 1) == bool(discarded)
    assert set(results.rows["llama_1b_1x1 infer"]) == {"inductor", "tokamak"}


def test_a_wrong_model_is_found():
    spec = gpu_models_worker.Model(_net(0.0), (4, 3, 8, 8), 10)
    true = gpu_models_worker.exact(spec, "train", "cpu", None)
    grads = {n: g * (1.1 if n == "5.bias" else 1) for n, g in true.grads.items()}
    found = gpu_models_worker.check(spec, "train", "cpu", lambda side, layers: replace(true, grads=grads) if side == "tokamak" else true)
    assert not found["right"] and "5.bias" in found["wrong"][0]


# -- reports -----------------------------------------------------------------------------------------------------------------
def measured() -> gpu_run.Results:
    results = gpu_run.Results("", [], {})
    gpu_run.run(results, results.missing(SOME, gpu_sides.SIDES), fake([], fail=((SOME[2], "inductor"),)))
    results.rows[SOME[0]]["tokamak"].update(percent=2.0)
    results.rows[SOME[1]]["inductor"].update(right=False)
    return results


def test_the_summary():
    rows = measured().rows
    text = gpu_report.summary(rows)
    assert "norm " in text and "reduction " in text and "80 (least 55): not met" in text
    assert f"slower than 0.95 of the best (1): {SOME[0]}" in text
    assert f"wrong (1): {SOME[1]}/inductor" in text and f"failed (1): {SOME[2]}/inductor" in text
    assert gpu_report.ratio(rows[SOME[1]]) == 1.0                # a wrong side is no competitor
    assert "iERR" in gpu_report.line(SOME[2], rows[SOME[2]]) and "WRONG" in gpu_report.line(SOME[1], rows[SOME[1]])
    assert all(len(gpu_report.line(n, r).splitlines()[0]) < 110 for n, r in rows.items())


def test_what_contractions_are_asked_for():
    names = {"linear_int4_bf16_4x4096x4096": ("percent", 50), "linear_bias_relu_bf16_64x4096x4096": ("percent", 65),
             "linear_bias_relu_bf16_1x4096x14336": ("percent", 80), "mlp_small_step_bf16_262144x64x64": ("inductor", 2.5),
             "swiglu_mlp_bf16_4096x4096x14336": ("inductor", 1.05), "mlp_bf16_8192x1024x4096": ("inductor", 1.05)}
    assert {n: gpu_report.asked(n) for n in names} == names
    for other in ("mlp_bf16_32x1024x4096", "linear_bias_relu_bf16_512x4096x4096", "linear_bias_relu_tf32_4x4096x4096", "softmax_bf16_8x8"):
        assert gpu_report.asked(other) is None
    assert all(gpu_report.asked(n) for n in CONTRACTIONS)
    side = lambda percent: {**GOOD, "percent": percent}
    rows = {"linear_int4_bf16_4x4096x4096": {"tokamak": side(49.0)},
            "mlp_small_step_bf16_262144x64x64": {"tokamak": side(50.0), "inductor": side(20.0)},
            "linear_bias_relu_bf16_64x4096x4096": {"tokamak": {**side(90.0), "right": False}}}
    text = gpu_report.summary(rows)
    assert "linear_int4_bf16_4x4096x4096 49% of 50: not met" in text and "2.50 times Inductor's of 2.5: met" in text and "of 65" not in text


def test_prices_of_few_rows_are_scored_on_what_they_were_not_fitted_on():
    one = gpu_few.known("linear_silu_gate_bf16_8x1024x4096", {"kernels": 8e-6, "vendor": 20e-6})
    rates = gpu_few.RATES[gpu_few.H200.arch[:2]]
    assert len(one.site.found) == 2 and one.loss(rates) == 0.0 and one.predicted(rates)["kernels"] < one.predicted(rates)["vendor"]
    slow = replace(one, measured={"kernels": 30e-6, "vendor": 20e-6})
    assert slow.loss(rates) == pytest.approx(0.5)
    better = gpu_few.fitted([slow], rates)
    assert slow.off(better) < 0.1 < slow.off(rates) and slow.loss(better) == 0.0
    text = gpu_few.report([one, slow])
    assert text.startswith("16 bits, fitted on the other half: 2 cases: choices lose") and "TF32" not in text
    assert gpu_few.known("linear_res_bf16_256x128x128", {"kernels": 1.0, "vendor": 1.0}) is None


def test_drawn_cases():
    """The same for a seed, of every kind, each a case, and of few megabytes to a few hundred."""
    found = gpu_drawn.drawn(150, seed=3)
    assert found == gpu_drawn.drawn(150, seed=3) and len(set(found)) > 140 and not set(found[:50]) & set(gpu_drawn.drawn(50, seed=4))
    assert {case(n).group for n in found} >= {"pointwise", "norm", "norm-bwd", "reduction", "reduction-bwd", "loss", "bert"}
    assert all(1e6 < case(n).bytes < 2e9 for n in found)
    args = gpu.arguments(["--drawn", "7", "--seed", "3"])
    assert gpu.names(args) == found[:7]


def test_products_in_words(tmp_path, monkeypatch):
    names = gpu_grid.names("gemm", ("bf16", "tf32"), rows=(16, 1024))
    some = gpu_grid.sample(names, 40)
    assert some == gpu_grid.sample(names, 40) and len(set(some)) == 40 and len(gpu_grid.sample(names[:3], 40)) == 3
    assert some != gpu_grid.sample(names, 40, seed=1)
    why = "contraction 1x2x3 bf16: unprofitable: 12 us in one kernel, the vendor 3 us and 4 us behind it"
    side = lambda us, **more: {"device": 1e-6 * us, "right": True, **more}
    rows = {n: {"eager": side(120), "inductor": side(108), "tokamak": side(100, left=[why])} for n in some}
    rows[some[0]] = {"eager": side(120), "inductor": side(90), "tokamak": side(100, left=[])}
    rows[some[1]]["eager"] = {"failed": "no memory"}
    rows[some[2]]["tokamak"]["right"] = False
    text = gpu_products.summary(rows)
    assert f"under 0.97 of Inductor: {some[0]} 0.90" in text and f"wrong or failed: {some[1]}/eager, {some[2]}/tokamak" in text
    assert "unprofitable: x us in one kernel, the vendor x us and x us behind it: 39 cases" in text and "type tf32" in text
    assert gpu_products.ratio(rows[some[2]], "eager") is None and gpu_products.worst(rows, "inductor")[0] == (0.9, some[0])
    run = {"device": "none", "torch": "2", "triton": "3"}
    table = gpu_products.table([run], rows)
    assert f"| {some[0]} | 90.0 | 100.0 | 0.90 | 1.20 |  |" in table
    assert not gpu_products.compiling(rows)
    rows[some[3]] = {"inductor": side(90, compiled=2.0), "autotune": side(95, compiled=30.0), "tokamak": side(100, compiled=1.0)}
    assert gpu_products.compiling(rows) == ("first calls: Inductor 2.0 s on average, 2 at most; max-autotune 30.0 s on average, 30 at most; "
                                            "tokamak 1.0 s on average, 1 at most")
    assert "First calls: Inductor 2.0 s" in gpu_products.table([run], rows) and "0.950 (0.95)" in gpu_products.summary(rows)
    with pytest.raises(ValueError):
        gpu_products.table([run], {})
    assert all((Path(gpu.__file__).parent.parent / "BENCHMARKS.md").read_text().count(m) == 1 for m in (gpu_products.START, gpu_products.END))


def test_tf32_where_a_case_says_so():
    one, before = case("linear_bias_tf32_64x32x16"), torch.get_float32_matmul_precision()
    assert one.dtype is torch.float32 and one.tf32 and not case("linear_bias_f32_64x32x16").tf32
    with gpu_sides.multiplying(one):
        assert torch.backends.cuda.matmul.allow_tf32
    assert torch.get_float32_matmul_precision() == before
    assert gpu_sides.measure(one, "tokamak", (x := one.inputs("cpu")), gpu_sides.reference(one, x, 0), untimed, cached=True)["right"]


def test_the_tables_are_written_between_their_marks(tmp_path, monkeypatch):
    file = tmp_path / "B.md"
    file.write_text(f"before\n{gpu.START}\nold\n{gpu.END}\nafter\n")
    monkeypatch.setattr(gpu, "BENCHMARKS", file)
    results = measured()
    gpu.write(gpu_report.table(results.runs, results.rows), gpu.START, gpu.END)
    text = file.read_text()
    assert "old" not in text and text.startswith("before") and text.endswith("after\n") and all(f"| {n} |" in text for n in SOME)
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert {line.count("|") for line in rows} == {7, 15}
    with pytest.raises(ValueError):
        gpu_report.table(results.runs, {})
    real = (Path(gpu.__file__).parent.parent / "BENCHMARKS.md").read_text()
    assert all(real.count(mark) == 1 for mark in (gpu.START, gpu.END, gpu_models.START, gpu_models.END))


def test_the_table_of_models():
    side = {"first": 3.0, "wall": 0.01, "device": 0.009, "peak": 2e9, "kernels": 70, "error": 0.5, "right": True}
    mine = {**side, "opaque": {"mm": 2, "bmm": 1}}
    rows = {"net infer": {"floor": {"first": 1.0}, "eager": side, "inductor": {"failures": {"step": {"failed": "RuntimeError: no"}}},
                          "tokamak": mine},
            "net train": {"tokamak": {**side, "right": False}}}
    lines = gpu_models.table([RUN], rows).splitlines()
    assert len({x.count("|") for x in lines[2:]}) == 1 and lines[4].endswith(" 3 |") and "WRONG: tokamak" in lines[5]
    assert "FAILED RuntimeError: no" in gpu_models.line("net", "infer", rows["net infer"])
    with pytest.raises(ValueError):
        gpu_models.table([RUN], {})


def test_the_plot(tmp_path):
    found = gpu_plot.series(measured().rows)
    assert found["softmax bfloat16"]["tokamak"] == [(1024, 2.0)] and "inductor" not in found["rmsnorm bfloat16"]
    message = gpu_plot.plot(measured().rows, str(tmp_path / "p.png"))
    assert (message is None) == (tmp_path / "p.png").exists() and (message is None or "matplotlib" in message)


def test_the_command_measures_prints_and_goes_on(tmp_path, monkeypatch, capsys):
    log: list = []
    monkeypatch.setattr(gpu, "process", lambda *_, **__: fake(log))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    command = ["--cases", *SOME, "--json", str(tmp_path / "r.json")]
    assert gpu.main([*command, "--sides", "eager,inductor"]) == 0
    assert gpu.main(command) == 0 and gpu.main(command) == 0
    assert len(log) == 2
    assert gpu.main([*command, "--cases", "softmax_bf16_8x8", "--report"]) == 0 and len(log) == 2
    out = capsys.readouterr().out
    assert sum(x.startswith("sum_all_f32_128Mi ") for x in out.splitlines()) == 2 and "copy 4.00 TB/s" in out and "reduction" in out


def test_the_command_line(capsys):
    assert gpu.main(["--list", "--cases", "softmax_bf16_*1025"]) == 0
    assert capsys.readouterr().out.startswith("softmax_bf16_65472x1025 norm 268435200 bytes")
    args = gpu.arguments(["--grid", "softmax", "--dtypes", "fp16", "--near", "-1", "1", "--rows", "1024:4096", "--sides", "tokamak,eager"])
    assert args.sides == ("eager", "tokamak") and "softmax_f16_1024x4095" in gpu.names(args)
    with pytest.raises(SystemExit):
        gpu.main(["--cases", "nothing_bf16_1x1", "--list"])


# -- host time -----------------------------------------------------------------------------------------------------------------
def test_the_programs_of_the_host_benchmark_are_right_and_it_says_a_line_each(capsys):
    for program in (*(p for n, p in gpu_host.PROGRAMS.items() if n != "chain"), gpu_host.Program(gpu_host.chain(3), ((64, 64),))):
        inputs = program.inputs("cpu")
        with torch.no_grad():
            found, expected = (tree_leaves(f(*inputs)) for f in (gpu_sides.compiled("tokamak", program.fn), program.fn))
        assert len(found) == len(expected) and all((a - b).norm() <= 1e-5 * b.norm() for a, b in zip(found, expected))
    assert gpu_host.main(["--device", "cpu", "--programs", "gelu_train", "chain", "--sides", "eager", "--calls", "2", "--runs", "2", "--kept"]) == 0
    lines = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert lines[0][:3] == ["program", "side", "host us"]
    assert [line[:2] for line in lines[2:]] == [["gelu_train", "eager"], ["chain", "eager"]] and all(float(line[2]) > 0 for line in lines[2:])


def test_the_floor_of_the_host_benchmark_computes_once_and_walks_backward_each_time():
    program = gpu_host.PROGRAMS["gelu_train"]
    x, = program.inputs("cpu")
    floor = gpu_host.under("floor", program.fn)
    first = floor(x)
    first.sum().backward()
    gradient, x.grad = x.grad, None
    with torch.no_grad():
        x += 1
    again = floor(x)
    again.sum().backward()
    assert torch.equal(again, first) and torch.equal(x.grad, gradient) and again.grad_fn is not first.grad_fn


def test_sides_of_a_program_take_turns_and_find_room_in_the_devices_queue():
    order = []
    found = gpu_host.times({side: lambda side=side: order.append(side) for side in "ab"}, 3, lambda: order.append("wait"))
    one, two = ([side, "wait", side, side, side, "wait"] for side in "ab")
    assert order == [*two, *one, *one, *two] * (gpu_host.RUNS // 2) and list(found) == ["a", "b"]
    chain = gpu_host.Program(gpu_host.chain(3), ((4, 4),))
    assert gpu_host.operators(chain, chain.inputs("cpu")) == 6


def test_the_table_of_host_times_says_what_a_launch_takes():
    rows = {("chain", "eager"): gpu_host.Times(2e-4, 2.5e-4, 3e-4, 100), ("gelu", "floor"): gpu_host.Times(7e-6, 7e-6, 8e-6, 1),
            ("gelu", "tokamak"): gpu_host.Times(1e-5, 1.1e-5, 2e-5, 0)}
    assert gpu_host.table(rows).splitlines()[2:] == ["| chain | eager | 200.0 | 250.0 |  | 100 | 2.00 | 300.0 |",
                                                     "| gelu | floor | 7.0 | 7.0 |  | 1 |  | 8.0 |",
                                                     "| gelu | tokamak | 10.0 | 11.0 | 3.0 |  |  | 20.0 |"]
