"""Many cases by several processes: what one process does to a batch, on the CPU with a session that measures nothing, and the runner of several."""
from __future__ import annotations

import json
import os
import sys
import threading

import pytest
import torch

from benchmarks import gpu_batch, gpu_many, gpu_run
from benchmarks.gpu_case import parse
from benchmarks.gpu_measure import Span, Times

CASES = ("linear_bias_bf16_8x32x64", "linear_silu_gate_f16_8x32x64", "linear_res_f32_16x32x64")


class Untimed:
    """A session that calls everything once and says a millisecond."""

    def __init__(self):
        self.uses = 0

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def calls(self, fns):
        for fn in fns:
            fn()
        self.uses += len(fns)

    def times(self):
        return [Times(1e-3, 2e-3, 2, (("kernel", 1e-3),))] * self.uses


@pytest.fixture
def gpu(tmp_path):
    path = tmp_path / "gpu"
    path.touch()
    return gpu_batch.Turn(str(path))


def worked(todo, gpu, session=Untimed, size: int = 2) -> dict:
    said: list = []
    gpu_batch.work(todo, said.append, session, "cpu", gpu, size=size)
    return {(m["case"], m["side"]): m["result"] for m in said if "case" in m}


def test_every_side_of_a_batch_is_compared_with_float64(gpu):
    found = worked([(n, ("eager", "tokamak")) for n in CASES], gpu)
    assert set(found) == {(n, s) for n in CASES for s in ("eager", "tokamak")}
    assert all(r["right"] and r["error"] > 0 and r["device"] == 1e-3 and r["kernels"] == 2 for r in found.values())
    assert found[CASES[0], "tokamak"]["left"] and not found[CASES[0], "eager"]["left"]


def test_a_wrong_side_is_found_and_one_that_raises_costs_itself(gpu, monkeypatch):
    real = gpu_batch.compiled
    wrong = {"inductor": lambda fn: lambda *x: fn(*x) + 0.1, "tokamak": lambda fn: lambda *x: 1 / 0}
    monkeypatch.setattr(gpu_batch, "compiled", lambda side, fn, **more: wrong.get(side, lambda f: real("eager", f))(fn))
    found = worked([(n, ("eager", "inductor", "tokamak")) for n in CASES], gpu)
    for n in CASES:
        assert found[n, "eager"]["right"] and not found[n, "inductor"]["right"] and found[n, "tokamak"]["failed"].startswith("ZeroDivisionError")


def test_a_batch_that_the_profiler_lost_is_measured_case_by_case(gpu):
    class Lossy(Untimed):
        def times(self):
            if self.uses > 1:
                raise RuntimeError("the profiler shows 3 of 4 flushes")
            return super().times()
    found = worked([(n, ("eager",)) for n in CASES], gpu, Lossy)
    assert all(r["right"] for r in found.values()) and len(found) == 3


EVERY_KIND = ("layernorm_bwd_f32_16x33", "groupnorm_bwd_f32_nhwc_2x64x5x5", "batchnorm_f32_nhwc_4x8x6x6", "cross_entropy_f32_16x33",
              "cross_entropy_bwd_f32_16x33", "bias_dropout_add_ln_f32_64x128", "bias_dropout_add_ln_bwd_f32_64x128")


def test_layouts_indices_buffers_gradients_and_random_numbers(gpu, monkeypatch):
    seen: dict = {}

    def spy(fn):
        def called(*inputs):
            seen.setdefault(fn, []).append([(x.stride(), x.requires_grad) for x in inputs])
            return fn(*inputs)
        return called
    found = worked([(n, ("eager", "tokamak")) for n in EVERY_KIND], gpu)
    assert all(r.get("right") for r in found.values()), found
    monkeypatch.setattr(gpu_batch, "own_code", spy)
    worked([(n, ("eager",)) for n in EVERY_KIND], gpu)
    for n in EVERY_KIND:
        mine = [[(x.stride(), x.requires_grad) for x in parse(n).inputs("cpu")]]
        assert any(inputs in mine for calls in seen.values() for inputs in calls), n


def test_a_wrong_gradient_is_found(gpu, monkeypatch):
    real = gpu_batch.compiled

    class Doubled(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: x.clone())
        backward = staticmethod(lambda ctx, dy: 2 * dy)
    monkeypatch.setattr(gpu_batch, "compiled", lambda side, fn, **more: real(side, (lambda *x: Doubled.apply(fn(*x))) if side == "tokamak" else fn,
                                                                             **more))
    monkeypatch.setattr(gpu_batch, "own_code", lambda fn: fn)
    found = worked([("layernorm_bwd_f32_16x33", ("eager", "tokamak"))], gpu)
    assert found["layernorm_bwd_f32_16x33", "eager"]["right"] and found["layernorm_bwd_f32_16x33", "tokamak"]["right"] is False


def test_inputs_share_memory_and_have_the_values_of_their_case():
    memory, generator = gpu_batch.Memory("cpu"), torch.Generator().manual_seed(3)
    first, second = parse("linear_bias_f32_64x32x16"), parse("linear_scale_f32_8x32x16")
    one, two = memory.inputs(first), memory.inputs(second)
    assert [x.data_ptr() for x in one] == [x.data_ptr() for x in two] and [tuple(x.shape) for x in two] == [(8, 32), (16, 32), (16,)]
    assert all(x.is_contiguous() and x._base is None for x in two)
    gpu_batch.filled(first, one, generator)
    assert one[1].std().item() == pytest.approx(32 ** -0.5, rel=0.1) and one[0].std().item() == pytest.approx(1, rel=0.1)


def test_the_gpu_is_one_process_s_at_a_time(gpu):
    other, log = gpu_batch.Turn(gpu.path), []

    def wait():
        with other:
            log.append("other")
    with gpu, gpu:
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join(0.2)
        log.append("first")
    thread.join(10)
    assert log == ["first", "other"]


def test_dynamo_counts_copies_apart():
    from torch._dynamo.utils import counters
    counters.clear()
    fn = parse(CASES[0]).fn
    copies = [gpu_batch.own_code(fn) for _ in range(2)]
    assert copies[0].__code__ is not copies[1].__code__
    x, w, b = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
    for c in copies:
        torch.testing.assert_close(torch.compile(c, backend="eager", fullgraph=True)(x, w, b), fn(x, w, b))
    assert counters["stats"]["unique_graphs"] == 2


def test_calls_are_divided_at_the_flushes():
    call = lambda *times: [Span("k", 0, t) for t in times]
    found = gpu_batch.divided([call(10, 5), call(20), call(1000), call(7), call(90), call(70), call(8), call()], (1, 2), 2)
    assert [t.device for t in found] == [pytest.approx(17.5e-9), pytest.approx(7.5e-9), pytest.approx(80e-9)] and found[1].kernels == 1
    with pytest.raises(RuntimeError, match="3 of 4 flushes"):
        gpu_batch.divided([call(1)] * 3, (1,), 3)


# -- several processes -------------------------------------------------------------------------------------------------------
WORKER = """
import json, sys, os
out, job = os.fdopen(int(sys.argv[1]), "w", 1), json.loads(sys.stdin.readline())
say = lambda m: print(json.dumps(m), file=out)
say({"ready": {"copy": 4e12, "matmul": 7e14, "device": "none", "torch": "0", "triton": "0"}})
for name, sides in job["todo"]:
    say({"begin": name, "side": "reference"})
    for side in sides:
        if name.startswith("linear_silu") and not os.path.exists(job["lock"] + "died"):
            open(job["lock"] + "died", "w").close()
            os.kill(os.getpid(), 9)
        say({"case": name, "side": side, "result": {"device": 1e-3, "kernels": len(job["cores"]), "right": True}})
say({"end": True})
"""


def test_several_processes_share_the_cases(tmp_path):
    results = gpu_run.Results.open(str(tmp_path / "r.json"))
    todo = [(n, ("eager", "tokamak")) for n in CASES]
    said: list = []
    command = sys.executable, "-c", WORKER
    done = gpu_many.measure(results, todo, 2, 7, 0, 20.0, lambda name, side, result: said.append((name, side)), command=command)
    kept = json.loads((tmp_path / "r.json").read_text())
    assert done and len(said) == 6 and kept["rows"] == results.rows and set(results.rows) == set(CASES) and os.listdir(tmp_path) == ["r.json"]
    assert len(kept["runs"]) == 1 and all(r["run"] == 0 for row in results.rows.values() for r in row.values())
    lost = [r for r in results.rows[CASES[1]].values() if "failed" in r]
    assert len(lost) == 2 and "signal 9" in lost[0]["failed"]
    assert results.rows[CASES[0]]["eager"]["percent"] > 0
