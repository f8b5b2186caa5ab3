"""`tokamak.profile`: what is counted is right, what is measured adds up, kernels are judged by the written rule."""
import json
import threading
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

import tokamak
from tokamak.capture.registry import NO_KERNEL
from tokamak.errors import OptionError
from tokamak.runtime.graphed import Coverage
from tokamak.runtime.pieces import Left
from tokamak.tools import profile as profiling, traced, watch
from tokamak.tools.advice import following, for_break, for_recompile
from tokamak.tools.cli import main
from tokamak.tools.limits import Row, bound, kind_of
from tokamak.tools.names import rate_text
from tokamak.tools.profile import METRICS, Other, beyond, by_position, condition, profile, unsteady
from tokamak.tools.profile_report import alike, flops, shortened, what
from tokamak.tools.record import recording
from tokamak.tools.spans import Mark, Span, marks_of, spans_of
from tokamak.tools.traced import Slice, Traced, memory_use, peak_bytes, thinned
from tokamak.tools.watch import _medians as medians, Step, Times, Took, Watcher

from .measured import PEAKS, quick  # noqa: F401 (a fixture for all tests here)
from .programs import Block, branch, chain, line_of, softmax


def profiled(fn, *args, **kwargs):
    return profile(fn, *args, seconds=0.0, **kwargs)


def test_a_module_forward_and_backward():
    p = profiled(Block(), torch.randn(64, 16))
    assert list(p.eager.phases) == list(p.compiled.phases) == ["forward", "backward"] and {r.phase for r in p.rows} == {"forward", "backward"}
    assert p.compiled.step > 0 and p.eager.step > 0 and p.opaque == 3 and p.graphs == 2 and not p.advice
    assert sum(r.calls for r in p.rows if not r.opaque) == p.metrics["kernels"] == 4 and p.compiled.kernels == 4 + 3
    assert 0 < p.compiled.busy <= p.compiled.step and 0 < p.eager.busy <= p.eager.step
    assert p.fewest <= p.compiled.bytes <= p.eager.bytes
    assert [r.wasted for r in p.rows] == sorted((r.wasted for r in p.rows), reverse=True) and all(0 <= r.fraction <= 1 for r in p.rows)
    linear = next(r for r in p.rows if r.name == "addmm.default")
    assert linear.flops == 2 * 64 * 16 * 16 and linear.module == "fc" and linear.opaque and f":{line_of(Block.forward, 'self.fc')}" in linear.source
    assert [c.seconds for c in p.edges] == [PEAKS.memory_seconds(c.edge.bytes) for c in p.edges] and p.edges[0].edge.bytes == 64 * 16 * 4


def test_equal_kernels_of_several_layers_are_one_row():
    layers = torch.nn.ModuleList(Block() for _ in range(3))

    def fn(x):
        for layer in layers:
            x = layer(x)
        return x
    with torch.no_grad():
        p = profiled(fn, torch.randn(64, 16))
    linear, = (r for r in p.rows if r.opaque)
    assert linear.calls == 3 and linear.flops == 3 * 2 * 64 * 16 * 16 and linear.module.endswith(".*.fc") and len(linear.positions) == 3


def test_attention_has_its_operations():
    q, k, v = (torch.randn(2, 4, 32, 16, requires_grad=True) for _ in range(3))
    p = profiled(torch.nn.functional.scaled_dot_product_attention, q, k, v)
    product = 2 * 2 * 4 * 32 * 32 * 16                 # two in forward, five in backward
    assert {r.phase: r.flops for r in p.rows if "attention" in r.name} == {"forward": 2 * product, "backward": 5 * product}


def test_the_optimizer_is_a_phase_and_changes_nothing_for_good():
    model = Block()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    p = profiled(model, torch.randn(8, 16), optimizer=optimizer)
    assert list(p.compiled.phases) == ["forward", "backward", "optimizer"] and "optimizer" in {r.phase for r in p.rows}
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()) and all(q.grad is None for q in model.parameters())
    assert not optimizer.state_dict()["state"]
    assert all("torch's own code" in a.mend for a in p.advice)


def test_breaks_have_a_mend():
    p = profiled(branch, torch.ones(4))
    found, = p.advice
    assert found.what == "graph break" and "torch.where" in found.mend and f":{line_of(branch, 'if ')}" in found.place
    assert p.metrics["breaks"] == 1 and p.failures("breaks>0, kernels>100") == ["breaks>0: breaks is 1"]


@pytest.mark.parametrize("reason, words", [
    ("tensor 'x' size mismatch at index 0. expected 32, actual 48", "dynamic=True"), ("L['s'] == 0.1", "as a tensor"),
    ("tensor 'x' dtype mismatch", "cast"), ("len(L['xs']) == 2", "lists of one length"), ("something else", "the guard names")])
def test_advice_on_recompiles(reason, words):
    assert words in for_recompile(reason)


def test_advice_on_breaks():
    assert "capture_scalar_outputs" in for_break("Unsupported Tensor.item() call")
    assert "print behind" in for_break("Failed to trace builtin operator `print`")
    assert "ignore_logger_methods" in for_break("logging.Logger method not supported for non-export cases")
    assert "fullgraph=True" in for_break("unheard of")


def test_memory_at_the_peak():
    n = 1 << 20
    x = torch.randn(n)
    p = profiled(lambda x: ((x + 1).exp() * 2).sin(), x)
    assert p.compiled.peak == pytest.approx(4 * n, rel=0.15) and p.eager.peak == pytest.approx(8 * n, rel=0.01)
    assert p.predicted == 4 * n and p.held[-1].graph.startswith("inference_") and p.metrics["predicted_bytes"] == p.predicted
    step = Step([(lambda: torch.ones(n).add(1).sum(), (), {})])
    assert peak_bytes(step, "cpu") == pytest.approx(8 * n, rel=0.01)
    curve = memory_use(step, "cpu").curve
    assert curve[0] == (0.0, 0) and max(b for _, b in curve) == pytest.approx(8 * n, rel=0.01)
    assert [t for t, _ in curve] == sorted(t for t, _ in curve)


def test_memory_that_a_training_step_holds():
    layers = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(3)))
    p = profiled(layers, torch.randn(512, 64))
    assert p.predicted == pytest.approx(p.compiled.peak, rel=0.15)


def test_long_words_of_dynamo_end_with_a_word():
    assert shortened("one two three", 13) == "one two three" and shortened("one two three", 12) == "one two …"


def test_results_of_a_step_are_gone_with_its_gradients():
    found, model = [], torch.nn.Linear(4, 4)

    def forward(x):
        out = model(x)
        found.append(weakref.ref(out))
        return out
    for step in (Step([(forward, (torch.ones(2, 4),), {})]), Step([(lambda x: {"loss": forward(x)}, (torch.ones(2, 4),), {})])):
        step.phases()
        step()
        assert found.pop()() is None and len(step.leaves) == 2


def test_gradients_of_the_last_step_are_gone_before_the_next():
    held = []
    model = torch.nn.Linear(4, 4)
    step = Step([(lambda x: (held.append([p.grad for p in model.parameters()]), model(x))[1], (torch.ones(2, 4),), {})],
                lambda: held.append([p.grad is not None for p in model.parameters()]), list(model.parameters()))
    step()
    step()
    assert held[-2:] == [[None, None], [True, True]]


def test_a_long_curve_keeps_its_peaks():
    curve = [(i * 1e-6, (i * 7919) % 10007) for i in range(50_000)]
    kept = thinned(curve, 200)
    assert len(kept) <= 400 and max(b for _, b in kept) == max(b for _, b in curve) and kept[-1] == curve[-1] and list(kept) == sorted(kept)


def test_the_users_lines():
    p = profiled(Block(), torch.randn(64, 16))
    line, = p.lines
    assert line.source.line == line_of(Block.forward, "self.fc") and line.count == 7
    assert line.seconds == pytest.approx(sum(r.seconds for r in p.rows)) and "your lines" in str(p) and f"programs.py:{line.source.line}" in str(p)


def test_the_timeline_is_one_of_the_steps():
    p = profiled(Block(), torch.randn(64, 16))
    for side, lane in ((p.eager, "operator"), (p.compiled, "kernel")):
        phases = [s for s in side.timeline if s.lane == "phase"]
        inner = [s for s in side.timeline if s.lane == lane]
        assert [s.name for s in phases] == ["forward", "backward"] and inner and len(phases) + len(inner) == len(side.timeline)
        end = phases[-1].start + phases[-1].seconds
        assert all(0 <= s.start <= end and s.seconds > 0 for s in inner) and side.middle[0] <= side.step <= side.middle[1]
    assert {(s.graph, s.position) for s in p.compiled.timeline if s.lane == "kernel"} == {at for r in p.rows for at in r.positions}


def test_tiles_in_the_interpreter():
    p = profiled(softmax, torch.randn(64, 100), options={"target": "interpret"})
    row, = p.rows
    assert row.schedule.startswith("tile(") and row.fewest == 2 * 64 * 100 * 4


def test_it_prints_and_is_json():
    p = profiled(Block(), torch.randn(64, 16))
    text = str(p)
    for words in (f"bound by {p.bound}", "some CPU", "half of them", "bytes read and written", "fewest possible", "by wasted time",
                  "addmm.default (torch)", "programs.py:42"):
        assert words in text, words
    data = json.loads(p.to_json())
    assert data["format"] == profiling.FORMAT and data["metrics"].keys() == set(METRICS)
    assert data["rows"][0]["fraction"] == p.rows[0].fraction and data["peaks"]["device"] == "some CPU"


# -- the rule ----------------------------------------------------------------------------------------------------------------
def row(seconds, fewest=0, flops=0, calls=1, kind=""):
    limit = max(PEAKS.memory_seconds(fewest), PEAKS.arithmetic_seconds(flops))
    return Row("k", "forward", "", "", calls, seconds, fewest, fewest, flops, limit, kind)


@pytest.mark.parametrize("found, kind", [
    (row(2e-6, 8192), "launch"), (row(8e-6, 8192, calls=4), "launch"), (row(1.5e-4, 1 << 20), "memory"), (row(2.1e-4, 1 << 20), "latency"),
    (row(1.5e-4, 8192, 10**7), "arithmetic"), (row(1.5e-4, 1 << 20, 10**6), "memory")])
def test_classes(found, kind):
    assert kind_of(found, PEAKS) == kind


def test_fractions_and_waste():
    found = row(2e-4, 1 << 20)
    assert found.fraction == pytest.approx(0.5) and found.wasted == pytest.approx(1e-4)
    assert row(5e-5, 1 << 20).fraction == 1.0 and row(5e-5, 1 << 20).wasted == 0


def test_what_a_step_is_bound_by():
    found = [row(3e-4, kind="memory"), row(1e-4, kind="latency"), row(1e-4, kind="launch")]
    assert bound(found, 5e-4, 5e-4)[0] == "memory"                       # 20% of launches
    assert bound(found, 6e-4, 5e-4)[0] == "overhead"                     # and gaps: a third
    assert bound([row(3e-4, kind="arithmetic")], 3e-4, 3e-4)[0] == "arithmetic"
    assert bound([], 1e-3, 0.0)[0] == "overhead"


@pytest.mark.parametrize("text", ["kernels", "speed>1", "kernels>many", "kernels=3"])
def test_conditions_that_cannot_be_read(text):
    with pytest.raises(OptionError, match="is no condition"):
        condition(text)


# -- what the profiler saw ---------------------------------------------------------------------------------------------------
def event(name, device, start, duration, correlation, linked=0, annotation=False):
    return SimpleNamespace(name=lambda: name, device_type=lambda: device, start_ns=lambda: start, duration_ns=lambda: duration,
                           correlation_id=lambda: correlation, linked_correlation_id=lambda: linked, is_user_annotation=lambda: annotation)


def test_spans_stand_under_the_range_that_started_them():
    cpu, gpu = DeviceType.CPU, DeviceType.CUDA
    events = [event("Torch-Compiled Region", cpu, 50, 500, 1),
              event("tokamak:f:1", cpu, 100, 50, 7, annotation=True), event("tokamak:f:1", gpu, 500, 9, 7, annotation=True),
              event("cuLaunchKernel", cpu, 120, 5, 9, linked=1), event("k1", gpu, 500, 9, 9, linked=1),
              event("tokamak:f:2", cpu, 200, 50, 2, annotation=True), event("aten::mm", cpu, 210, 30, 3), event("gemm", gpu, 510, 30, 10, linked=3),
              event("aten::ones", cpu, 300, 5, 4), event("fill", gpu, 560, 3, 11, linked=4), event("Context Sync", gpu, 570, 3, 12)]
    found = spans_of(events, "tokamak:")
    assert [(s.name, s.under) for s in found] == [("k1", "tokamak:f:1"), ("gemm", "tokamak:f:2"), ("fill", "")]
    seen = Traced(found, [*found, Span("other", 600, 4, "")], 2)
    assert seen.busy == pytest.approx(42e-9 / 2) and seen.kernels == 2
    assert by_position(seen, []) == {("f", 1): pytest.approx(4.5e-9), ("f", 2): pytest.approx(15e-9)}
    assert beyond(seen, []) == (Other("other", 0.5, pytest.approx(2e-9)), Other("fill", 0.5, pytest.approx(1.5e-9)))


def test_a_timeline_of_what_the_profiler_saw():
    cpu, gpu = DeviceType.CPU, DeviceType.CUDA
    events = []
    for n, start in enumerate((0, 1000)):
        events += [event(f"phase:forward#{n}", cpu, start, 400, 20 + n), event("tokamak:f:1", cpu, start + 100, 50, 30 + n),
                   event("cuLaunchKernel", cpu, start + 120, 5, 40 + n, linked=1), event("k1", gpu, start + 500, 9, 40 + n, linked=1),
                   event("aten::ones", cpu, start + 300, 5, 50 + n), event("fill", gpu, start + 520, 3, 60 + n, linked=50 + n)]
    seen = Traced(spans_of(events, "phase:"), spans_of(events, "tokamak:"), 2, marks_of(events, ("phase:", "tokamak:")))
    assert seen.phases() == {"forward": pytest.approx(12e-9)} and marks_of(events, ("phase:",))[1] == Mark("phase:forward#1", 1000, 400)
    assert seen.timeline(1) == (
        Slice("phase", "forward", 0.0, pytest.approx(400e-9)), Slice("host", "starts f:1", pytest.approx(100e-9), pytest.approx(50e-9), "f", 1),
        Slice("kernel", "k1", pytest.approx(500e-9), pytest.approx(9e-9), "f", 1),
        Slice("kernel", "fill", pytest.approx(520e-9), pytest.approx(3e-9)))
    assert seen.timeline(7) == ()


def test_overlapping_spans_are_busy_once():
    assert Traced([Span("a", 0, 10), Span("b", 5, 10), Span("c", 30, 1)], [], 1).busy == pytest.approx(16e-9)


def test_no_bytes_are_fewer_than_the_fewest_possible():
    """A table of which a few rows are read counts as what is read of it; and what torch counts no FLOPs of has none to show."""
    picked = lambda table, i: torch.nn.functional.embedding(i, table) * 2
    p = tokamak.profile(picked, torch.randn(5000, 8), torch.tensor([1, 2]), seconds=0.0)
    assert 0 < p.fewest <= p.compiled.bytes < 5000 * 8 * 4
    call = Row("sort.default", "inference", "", "", 1, 1.0, 8, 8, 0, 0.5, "memory", opaque=NO_KERNEL)
    assert (flops(call), flops(replace(call, opaque="")), flops(replace(call, flops=2000))) == ("–", "0", "2k")


def test_a_gpus_peak_is_its_allocators(monkeypatch):
    """From behind what is given back to the end of one step; torch's profiler is not used."""
    held, said = [100], []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: said.append("wait"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: held[-1])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: held.append(held[-1]) or said.append("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: max(held))
    monkeypatch.setattr(torch.profiler, "profile", None)
    step = Step([(lambda: held.append(held[-1] + 50) or said.append("step"), (), {})])
    assert peak_bytes(step, "cuda", lambda: held.clear() or held.append(70)) == 50
    assert said == ["step", "wait", "reset", "step", "wait"]


# -- steps in turn -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("alone, order", [(1e9, "aaabbb"), (-1.0, "abab")])
def test_the_first_short_step_of_a_turn_does_not_count(monkeypatch, alone, order):
    """It finds caches that another side has filled; a very long step makes a turn alone."""
    monkeypatch.setattr(watch, "ALONE", alone)
    made, watcher = [], Watcher()
    steps = {name: Step([(made.append, (name,), {})]) for name in "ab"}
    looked = watch.Looked("b", watcher)
    for s in steps.values():
        s()
    made.clear()
    found = watch.interleaved(steps, "cpu", 0.0, least=2, looked=looked)
    assert "".join(made) == order and len(looked.steps) == 2 and all(0 < t.least <= t.step for t in found.values())


# -- watching ----------------------------------------------------------------------------------------------------------------
def test_nothing_stands_before_a_kernel_while_nobody_looks():
    passed = []

    class Counting(Watcher):
        def watch(self, graph):
            inner = super().watch(graph)
            return lambda position, function: lambda *args, **kwargs: (passed.append(position), inner(position, function)(*args, **kwargs))[1]
    watcher, x = Counting(), torch.randn(8, 32)
    with torch.no_grad(), recording(watcher):
        compiled = torch.compile(lambda x: torch.softmax(x, -1) @ x.t(), backend="tokamak")
        compiled(x)
        compiled(x)
        assert not passed
        watcher.mode = "time"
        looked = compiled(x)
        watcher.mode = ""
        assert len(passed) == 2 and torch.equal(looked, compiled(x)) and len(passed) == 2


@pytest.mark.parametrize("target", ["", "interpret"])
def test_a_watched_program_computes_the_same_and_tells_of_every_kernel(target):
    watcher, args = Watcher(), [torch.randn(8, 32) for _ in range(3)]
    linear = torch.nn.Linear(32, 32)
    with torch.no_grad(), recording(watcher, target=target):
        f = tokamak.compile(lambda x, w, b: linear(chain(x, w, b)) * 2)
        wanted = [f(*args) for _ in range(2)]
        assert not watcher.events
        watcher.mode = "time"
        again = f(*args)
        watcher.mode = "ranges"
        assert torch.equal(f(*args), wanted[0])
    assert torch.equal(again, wanted[0]) and torch.equal(wanted[0], wanted[1])
    assert len(watcher.events) == 3 and len({position for _, position, *_ in watcher.events}) == 3 and all(t > 0 for *_, t in watcher.events)
    torch.testing.assert_close(again, linear(chain(*args)) * 2)


# -- the command ---------------------------------------------------------------------------------------------------------------
SCRIPT = """
import torch
linear = torch.nn.Linear(16, 16)
f = torch.compile(lambda x: linear(x).relu() * 2, backend="tokamak")
for n in (8, 9):
    f(torch.randn(n, 16)).sum().backward()
if {fails}:
    raise ValueError("oops")
"""


def test_the_command(tmp_path, capsys):
    script, out = tmp_path / "script.py", tmp_path / "out.json"
    html, trace = tmp_path / "report.html", tmp_path / "trace.json"
    script.write_text(SCRIPT.format(fails=False))
    files = ["--json", str(out), "--html", str(html), "--trace", str(trace)]
    assert main(["profile", "--seconds", "0", *files, "--fail-if", "kernels>60", str(script)]) == 0
    assert html.read_text().startswith("<!doctype html>") and json.loads(trace.read_text())["traceEvents"]
    text, said = capsys.readouterr()
    assert f"wrote {html}" in said and f"wrote {trace}" in said
    assert "a step: the 2 captured functions that" in text and "next: mend the 1 new capture below" in text
    assert "bound by" in text and "captured again" in text and "mark_dynamic" in text and "script.py:4" in text
    data = json.loads(out.read_text())
    assert data["metrics"]["recompiles"] == 1 and data["metrics"]["kernels"] >= 2 and data["first"] > 0
    torch._dynamo.reset()
    assert main(["profile", "--seconds", "0", "--fail-if", "graphs>1,opaque>1000", str(script)]) == 1
    assert "graphs>1: graphs is 4" in capsys.readouterr().err


def test_steps_that_differ_much_are_said_to():
    calm, busy = Times(1.0, 1.0, least=0.9, middle=(0.95, 1.1)), Times(0.01, 0.01, least=2e-3, middle=(5e-3, 0.03))
    note, = unsteady({"eager": calm, "compiled": busy})
    assert note.startswith("half of the compiled steps lie 250% of a step apart, the shortest took 2 ms") and "more seconds" in note


def test_kernels_take_their_part_of_steps_that_other_work_stretched():
    """Each kernel is stretched in one step of three: the median of each, 1, is not what they took of the steps."""
    looked, second = watch.Looked("b", Watcher()), 10 ** 9
    for stretched in range(3):
        looked.steps.append([("f", n, 0, (10 if n == stretched else 1) * second) for n in range(3)])
    looked.took = (12.5, 12.5, 12.5)
    assert set(looked.seconds().values()) == {1.0}
    assert looked.busy(25.0) == pytest.approx(24.0)                 # 12 of 12.5
    assert looked.busy(2.0) == 2.0
    looked.took = (100.0, 100.0, 100.0)                             # looking itself was slow
    assert looked.busy(20.0) == 3.0


def test_eagers_operators_take_their_part_of_the_step_that_the_profiler_saw():
    line = (Slice("phase", "forward", 0.0, 3.0), Slice("phase", "backward", 3.0, 1.0), Slice("operator", "mm", 0.5, 1.0))
    assert profiling.part_of(line, "operator") == 0.25 and profiling.part_of((), "operator") == 0.0


def test_other_work_on_the_machine_is_said():
    assert not [*profiling.crowded(0.05, "cpu"), *profiling.crowded(0.4, "cuda:0")]
    (one,), (other,) = profiling.crowded(0.8, "cpu"), profiling.crowded(0.8, "cuda:0")
    assert one.startswith("other work took 80% of the cores") and "set_num_threads" in one and "host" in other


def test_the_line_of_a_kernel_is_shown_whole():
    row = replace(NORM, source="/somewhere/modeling_bert.py:495  x = y", module="a.b")
    assert list(what(row)) == ["red_fused_norm_0  modeling_bert.py:495  a.b  x = y"]
    assert list(what(replace(row, schedule="rows"))) == ["red_fused_norm_0  modeling_bert.py:495  a.b  x = y", "    rows"]
    long = "red_fused_" + "norm_" * 11 + "0"
    assert list(what(replace(row, name=long, schedule="rows"))) == [long, "    modeling_bert.py:495  rows"]
    assert list(what(replace(row, name=long, opaque="why"))) == [long + " (torch)", "    modeling_bert.py:495  a.b  x = y"]


def test_edges_between_the_same_lines_are_one_row():
    edge = lambda made, used, nbytes: profiling.Costly(SimpleNamespace(made=made, used=used, kind="k", reason="r", bytes=nbytes), nbytes * 1.0)
    edges = [edge("a", "b", 4), edge("a", "c", 9), edge("a", "b", 8), edge(None, "b", 1), edge(None, "b", 2)]
    assert [[c.edge.bytes for c in same] for same in alike(edges)] == [[4, 8], [9], [2], [1]]


PRODUCT, NORM = (Row(name, "forward", "", "", 1, 1.0, 8, 8, 8, limit, kind, opaque=opaque) for name, limit, kind, opaque in (
    ("mm.default", 0.9, "arithmetic", "a product"), ("red_fused_norm_0", 0.2, "latency", "")))


@pytest.mark.parametrize("bound, device, rows, facts, words", [
    ("overhead", "cpu", [], {"breaks": 1, "recompiles": 2}, "mend the 1 graph break and 2 new captures below"),
    ("overhead", "cpu", [], {}, "larger batch: the host takes 25% of a step of 7 kernels"),
    ("overhead", "cuda:0", [], {}, 'mode="reduce-overhead"'),
    ("overhead", "cuda:0", [], {"recorded": True}, "what CUDA graphs leave out"),
    ("arithmetic", "cuda:0", [PRODUCT], {}, 'set_float32_matmul_precision("high"): products in TF32 were measured 8.0 times as fast'),
    ("arithmetic", "cpu", [PRODUCT], {"rates": {"float32": 1.0, "bfloat16": 4.0}}, 'allow="bf16"): products in bfloat16 were measured 4.0'),
    ("arithmetic", "cpu", [PRODUCT], {"rates": {"float32": 1.0, "bfloat16": 1.1}}, "fewer bits"),
    ("memory", "cpu", [NORM], {}, "fewer bits"),
    ("latency", "cpu", [NORM], {}, "red_fused_norm_0 wastes 20% of the step: tokamak verify --extract red_fused_norm_0"),
    ("latency", "cuda:0", [NORM], {}, "tokamak tune"),
    ("latency", "cuda:0", [PRODUCT, replace(PRODUCT, limit=0.1)], {}, "mm.default wastes 22% of the step: it is torch's own call; torch.set_float"),
    ("latency", "cpu", [], {}, "larger batch"),
])
def test_what_to_do_first(bound, device, rows, facts, words):
    side = profiling.Side(4.0, 1.0, 3.0, {}, 7, 0, 0)
    facts = {"rates": {"float32": 1.0, "tf32": 8.0, "bfloat16": 16.0} if device != "cpu" else PEAKS.matmul, **facts}
    peaks = replace(PEAKS, matmul=facts.pop("rates"))
    assert words in following(bound, side, peaks, rows, **{"breaks": 0, "recompiles": 0, "recorded": False, **facts}, device=device)


def test_phases_add_up_to_the_step_that_is_shown():
    took = [Took(0, step, step, {"forward": step / 4, "backward": 3 * step / 4}) for step in (1.0, 2.0, 8.0, 16.0)]
    found = medians(took)
    assert found.step == found.took.step == sum(found.took.phases.values()) == 2.0


@pytest.mark.parametrize("rate, text", [(26.8e9, "26.8 GFLOP/s"), (1.24e12, "1.24 TFLOP/s"), (12.0, "12 FLOP/s")])
def test_rates(rate, text):
    assert rate_text(rate) == text


def test_wrong_commands(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(fails=True))
    assert main(["profile", "--fail-if", "kernels>", str(script)]) == 2 and "is no condition" in capsys.readouterr().err
    assert main(["profile", "--seconds", "0", str(script)]) == 1
    found = capsys.readouterr()
    assert "ValueError: oops" in found.err and "bound by" in found.out
    script.write_text("print(1)")
    assert main(["profile", str(script)]) == 1 and "compiled nothing" in capsys.readouterr().err


def test_what_cuda_graphs_hold():
    p = profiled(softmax, torch.randn(64, 100))
    assert not p.coverage and "CUDA graphs" not in str(p)                       # there are none on a CPU
    on_gpu = replace(p, device="cuda:0")
    assert "CUDA graphs: off" in str(on_gpu) and "reduce-overhead" in str(on_gpu)
    left = (("item", "it waits for the device"), ("nonzero", "it waits for the device"))
    text = str(replace(on_gpu, coverage=(profiling.Covered("forward_0", 20, 22, 2, left, "3 replays"),)))
    pools = replace(on_gpu, compiled=replace(p.compiled, memory=replace(p.compiled.memory, pools=5 << 20)))
    pooled = next(x for x in str(pools).splitlines() if x.startswith("memory of recordings"))
    assert "memory of recordings" not in text and pooled.split()[3:5] == ["5", "MiB"]
    assert "forward_0: 20 of 22" in text and "left out: item, nonzero: it waits for the device" in text and "3 replays" in text


def test_what_recordings_say_of_a_program():
    graphed = SimpleNamespace(coverage=Coverage((3, 4), (Left(2, "item", "it waits"),), ()))
    found, = profiling.covered([SimpleNamespace(name="f", values={"graphs": graphed}), SimpleNamespace(name="g", values={})])
    assert (found.graph, found.held, found.total, found.pieces, found.left) == ("f", 7, 8, 2, (("item", "it waits"),))


def test_operators_are_those_of_a_typical_step(monkeypatch):
    """The first step that torch's profiler sees does not count."""
    many, outermost = iter([3, 3, 5, 1, 3, 2]), traced.outermost
    monkeypatch.setattr(traced, "outermost", lambda events: [(start, 1, name) for start, _, name in outermost(events)])      # whatever else runs

    def step(x):
        for _ in range(next(many)):
            x = x.sin()
        return x
    found = watch.Step([(step, (torch.ones(1 << 16),), {})])
    found()                                                                 # 3, twice
    total, line = traced.operators(found, 3)                                # 5, and of 1, 3 and 2 the one between
    ran = [s for s in line if s.lane == "operator"]
    assert [s.name for s in ran] == ["sin", "sin"] and total == pytest.approx(sum(s.seconds for s in ran))


def test_a_process_that_was_profiled_before_says_so(monkeypatch):
    monkeypatch.setattr(profiling, "WATCHED", used := threading.Event())
    assert profiling.behind_another("cuda:0") == ()
    used.set()
    assert profiling.behind_another("cuda:0") == (profiling.LATE,) and profiling.behind_another("cpu") == ()


@pytest.mark.parametrize("call", [lambda: tokamak.explain(3), lambda: tokamak.profile("x"), lambda: tokamak.optimize(None), lambda: tokamak.verify(3),
                                  lambda: tokamak.tune(3)])
def test_what_is_no_function_is_named(call):
    with pytest.raises(OptionError, match="give a module or a function"):
        call()


def test_arguments_that_cannot_be():
    x = torch.ones(3)
    with pytest.raises(OptionError, match="optimizer=3"):
        tokamak.profile(torch.sin, x, optimizer=3)
    for wrong in ("x", float("nan"), float("inf"), None):
        for measure in (tokamak.profile, tokamak.optimize):
            with pytest.raises(OptionError, match=f"seconds={wrong!r}: a number of seconds"):
                measure(torch.sin, x, seconds=wrong)
    with pytest.raises(OptionError, match="seconds=-1"):
        tokamak.profile(torch.sin, x, seconds=-1)
    with pytest.raises(OptionError, match="allow='fp4'"):
        tokamak.optimize(torch.sin, x, allow="fp4")
