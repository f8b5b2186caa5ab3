"""The tools on graphs of a GPU, which the interpreter runs here: kernels and their names, bytes against the fewest, source lines, what each topic and
stage prints, and the reference's check."""
import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import tokamak
from tokamak.codegen import stages
from tokamak.errors import CheckFailed
from tokamak.fuse import prefixes
from tokamak.runtime import gpu_build
from tokamak.schedule import prefixes as blocked
from tokamak.tools import cli, limits
from tokamak.tools.explain import explanation
from tokamak.tools.kernels import kernels, memory_operations
from tokamak.tools.machine import Peaks
from tokamak.tools.record import recording
from tokamak.tools.show import STAGE_TEXTS, TOPICS, exact_text

from .programs import chain, line_of, softmax

pytest.importorskip("triton")
F32 = 4


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def recorded(fn, *args, **options):
    """The Recorder of one call as on a GPU, and of its backward."""
    with recording(strict=True, target="interpret", cache_dir="", **options) as seen:
        out = tokamak.compile(fn, dynamic=False)(*args)
        if out.requires_grad:
            out.backward(torch.randn_like(out))
    return seen


def records(fn, *args, **options):
    return recorded(fn, *args, **options).graphs


def parameters(*shapes):
    return tuple(torch.randn(s, requires_grad=True) for s in shapes)


def layer_norm(x, w, b):
    return F.layer_norm(x, (x.shape[-1],), w, b)


def batch_norm(x, w, b):
    return F.batch_norm(x, None, None, w, b, True)


def scaled_rows(w, i):
    return F.embedding(i, w) * 2


def families(record):
    return [k.name.split("_")[0] for k in kernels(record)]


# -- kernels, names, bytes -----------------------------------------------------------------------------------------------
def test_a_row_in_registers_is_read_once():
    graph, = records(softmax, torch.randn(64, 1000))
    found, = kernels(graph)
    assert found.name == "per_fused_amax_div_exp_sub_sum_0" and found.schedule.startswith("tile(")
    assert [a.name for a in found.reads] == ["x"] and [a.name for a in found.writes] == ["output 0"]
    assert found.bytes == found.fewest == 2 * 64 * 1000 * F32
    assert found.device == "cpu" and int(found.programs) >= 1 and found.how == "interpreted" and found.registers is None
    first = line_of(softmax, "torch.exp")
    assert [s.line for s in found.sources] == [first, first + 1]


@pytest.mark.parametrize("cache, again", [(1 << 40, 0), (1 << 16, 1)])
def test_a_row_run_through_again_counts_when_no_cache_holds_it(cache, again):
    graph, = records(lambda x: (x / x.pow(2).sum(-1, keepdim=True)).relu(), torch.randn(64, 300_000), until="lower")
    graph.add("target", replace(graph.values["target"], l2=cache))
    found, = kernels(graph)
    assert "looped" in found.schedule and found.name.startswith("red_fused_")
    matrix = 64 * 300_000 * F32
    assert found.fewest == 2 * matrix and found.bytes == (2 + again) * matrix


def test_a_fold_across_programs_is_two_kernels_and_a_workspace():
    graph, = records(lambda x: x.sum(0), torch.randn(512, 64))
    first, second = kernels(graph)
    assert (first.name, second.name) == ("red_fused_sum_0", "per_fused_sum_1") and "split(" in first.schedule
    space, = first.writes
    assert space.name == second.reads[0].name == "partial results 0 (sum)"
    assert space.bytes == second.reads[0].bytes and space.bytes % (64 * F32) == 0 and space.bytes >= 2 * 64 * F32
    before, after = memory_operations(graph)
    assert (before.operations, before.accesses, before.bytes) == (1, 2, (512 + 1) * 64 * F32)
    assert (after.operations, after.accesses, after.bytes) == (2, 4, before.bytes + 2 * space.bytes)


def test_every_partial_result_of_an_index_has_a_name():
    graph, = records(lambda x: x.argmax(), torch.randn(700, 70))
    first, second = kernels(graph)
    assert len({a.name for a in first.writes}) == 2 and {a.name for a in first.writes} == {a.name for a in second.reads}
    assert [a.type.split("[")[0] for a in first.writes] == ["f32", "i64"]


def test_layer_norm_forward_and_backward():
    forward, backward = records(layer_norm, *parameters((600, 77), 77, 77))
    matrix, column, row = 600 * 77 * F32, 600 * F32, 77 * F32
    found, = kernels(forward)
    assert found.name == "per_fused_native_layer_norm_0" and found.bytes == found.fewest == 2 * matrix + 2 * row + 2 * column
    assert families(backward) == ["red", "per"]           # the second kernel holds the programs' partial results
    first, second = kernels(backward)
    spaces = sum(a.bytes for a in second.reads)
    assert {a.name for a in second.writes} == {"gradient of w", "gradient of b"} and spaces % (2 * row) == 0
    assert first.bytes == first.fewest == 3 * matrix + row + 2 * column + spaces and second.bytes == spaces + 2 * row
    assert {s.line for k in (found, first, second) for s in k.sources} == {line_of(layer_norm, "F.layer_norm")}
    assert {"x", "w", "gradient of output 0"} <= {a.name for a in first.reads} and "gradient of x" in {a.name for a in first.writes}


def test_prefixes_in_blocks(monkeypatch):
    """What the blocks fold to, and the prefixes of that, are bytes that one kernel leaves to the next."""
    monkeypatch.setattr(prefixes, "LONG", 64)
    monkeypatch.setattr(blocked, "LEAST", 16)
    monkeypatch.setattr(blocked, "BLOCK", 128)
    graph, = records(lambda x: x.softmax(-1).cumsum(-1), torch.randn(3, 384))
    found = kernels(graph)
    statistics, matrix, blocks = 3 * F32, 3 * 384 * F32, 3 * 12 * F32
    assert [(k.bytes, k.fewest) for k in found] == [(b, b) for b in (matrix + 2 * statistics, matrix + 2 * statistics + blocks, 2 * blocks,
                                                                     2 * matrix + 2 * statistics + blocks)]
    left = [{a.name for a in k.writes} for k in found[:3]]
    assert left[0] | left[2] | {"x"} == {a.name for a in found[3].reads} and left[1] == {a.name for a in found[2].reads}
    assert all(name.startswith("partial results") for names in left for name in names)


def test_batch_norm_forward_and_backward():
    graphs = records(batch_norm, *parameters((8, 6, 5, 7), 6, 6))
    values, channels = 8 * 6 * 5 * 7 * F32, 6 * F32
    assert [families(g) for g in graphs] == [["per"], ["per"]]
    forward, backward = (kernels(g)[0] for g in graphs)
    assert forward.bytes == forward.fewest == 2 * values + 4 * channels
    assert backward.bytes == backward.fewest == 3 * values + 5 * channels


def test_embedding_forward_and_backward():
    forward, backward = records(scaled_rows, *parameters((100, 33)), torch.randint(0, 100, (5, 9)))
    found, = kernels(forward)
    assert found.name == "poi_fused_embedding_mul_0" and found.bytes == 45 * 8 + 2 * 45 * 33 * F32
    fill, update = kernels(backward)
    assert families(backward) == ["poi", "sca"] and not fill.reads
    assert sum(a.bytes for a in fill.writes) == 100 * 33 * F32
    assert [a.bytes for a in update.writes] == [45 * 33 * F32] and "gradient of w" in {a.name for a in update.reads} & {a.name for a in update.writes}


def test_bytes_are_counted_at_the_types_that_are_stored():
    found, = kernels(records(lambda x, y: x + y, torch.randn(64, 32, dtype=torch.bfloat16), torch.randn(32))[0])
    assert found.bytes == found.fewest == 64 * 32 * 2 + 32 * F32 + 64 * 32 * F32


def test_unknown_sizes_are_named_and_counted_as_they_were_first_seen():
    with recording(strict=True, target="interpret", cache_dir="") as seen:
        tokamak.compile(lambda x: x * 2, dynamic=True)(torch.randn(60, 70))
    found, = kernels(seen.graphs[0])
    assert found.bytes == 2 * 60 * 70 * F32 and "s" in found.programs and "//" in found.programs


# -- what is printed -----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def norm():
    torch._dynamo.reset()
    return records(layer_norm, *parameters((600, 33), 33, 33))


@pytest.mark.parametrize("stage", STAGE_TEXTS)
def test_every_stage_prints(norm, stage):
    assert all(len(STAGE_TEXTS[stage](r).splitlines()) >= 1 for r in norm)


def test_the_listing_names_values_and_lines():
    graph, = records(chain, *(torch.randn(10, 48) for _ in range(3)))
    lines = [" ".join(line.split()) for line in TOPICS["output_code"](graph).splitlines()]
    n = line_of(chain, "x.pow")
    for wanted in ("def poi_fused_add_mul_pow_0(", "p0, # x: f32[10, 48], *fp32", "p3, # output 0: f32[10, 48], *fp32", "n0, # 480, i32",
                   f"t4 = (t3 * t3) # pow_1, line {n}", f"t6 = (t4 * t5) # mul, line {n + 1}"):
        assert wanted in lines, "\n".join(lines)
    assert any(line.startswith("tl.store(p3 + ") and line.endswith("# output 0") for line in lines)
    assert lines[0] == "# poi_fused_add_mul_pow_0: inference" and "def tk_inference" in " ".join(lines)


def test_a_second_kernel_says_what_its_partial_results_are_of(norm):
    text = TOPICS["output_code"](norm[1])
    assert "# partial results 0 (sum)" in text and "# sum for gradient of w" in text and "# gradient of b" in text


def test_fusion_and_schedule_have_a_line_a_kernel(norm):
    names = [k.name for k in kernels(norm[1])]
    assert len(names) == 2 and ", ".join(names) in TOPICS["fusion"](norm[1])
    lines = TOPICS["schedule"](norm[1]).splitlines()
    assert [line.split(":")[0] for line in lines] == names and "split(i0 / " in lines[0] and " over i0 < 600, i1 < 33" in lines[0]


def test_schedules_print_before_there_are_kernels():
    graph, = records(lambda x: x.sum(0), torch.randn(512, 64), until="schedule")
    assert STAGE_TEXTS["schedule"](graph).startswith("red_fused_sum_0: tile(") and not kernels(graph)


def test_the_explanation_says_how_each_kernel_runs():
    seen = recorded(layer_norm, *parameters((600, 77), 77, 77))
    e = explanation(seen)
    text = str(e)
    assert "2 operations became 3 kernels" in text and "interpreted" in text
    assert all(k.schedule in text and f"programs({k.programs})" in text for k in e.kernels)
    assert json.loads(e.to_json())["graphs"][1]["kernels"][0]["schedule"] == e.graphs[1].kernels[0].schedule


def test_registers_and_shared_memory_of_what_was_built(norm):
    record = norm[1]
    units = [p.unit for b in record.values["render"].values() for p in b.parts]
    before = dict(record.units)
    made = gpu_build.build(units, ("cuda", 90, 32), report=lambda built: record.add("unit", built))
    try:
        found = kernels(record)
        assert [k.how for k in found] in (["compiled"] * 2, ["process"] * 2)
        for k in found:
            assert (k.registers, k.spilled, k.shared) == (made[k.key].registers, made[k.key].spilled, made[k.key].shared)
        assert all(0 < k.registers <= 255 for k in found)
        assert f"{found[0].registers} registers a thread" in STAGE_TEXTS["build"](record)
        assert f"# takes: {found[0].registers} registers a thread" in TOPICS["output_code"](record)
    finally:
        record.units = before


# -- the command, and checking -------------------------------------------------------------------------------------------
SCRIPT = """
import torch
@torch.compile(backend="tokamak", dynamic=False)
def f(x):
    return torch.softmax(x * 2, -1)
f(torch.ones(8, 33))
"""


@pytest.mark.parametrize("command, wanted", [(("explain",), "per_fused_mul_softmax_0"), (("compile", "--until", "lower"), "tile("),
                                             (("compile", "--until", "render"), "def per_fused_mul_softmax_0("),
                                             (("compile", "--until", "render", "--exact"), "@triton.jit"),
                                             (("compile", "--until", "build"), "is interpreted")])
def test_the_command(command, wanted, tmp_path, capsys):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    assert cli.main([*command, "--target", "interpret", str(path)]) == 0
    assert wanted in capsys.readouterr().out


def test_the_text_as_it_is_built(norm):
    text = exact_text(norm[1])
    assert text.count("@triton.jit") == 2 and "# gradient" not in text


def test_right_programs_pass_the_check():
    with tokamak.scope(check=True):
        records(layer_norm, *parameters((70, 33), 33, 33))
        torch._dynamo.reset()
        records(scaled_rows, *parameters((100, 33)), torch.randint(0, 100, (5, 9)))


def test_a_wrong_kernel_is_named_with_its_line(monkeypatch):
    true = stages.triton.render
    monkeypatch.setattr(stages.triton, "render", lambda k, name: true(k, name).replace(" * tl.full([], 2.0,", " * tl.full([], 2.001,"))
    with pytest.raises(CheckFailed, match=r"mul\.Tensor.*test_gpu\.py.*\* 2.*largest error"):
        records(lambda x: x * 2, torch.ones(100), check=True)


def test_without_triton_the_command_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("tokamak.runtime.gpu_interpret.triton_version", lambda: "")
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    assert cli.main(["explain", "--target", "interpret", str(path)]) == 1
    assert "tokamak: Triton is not installed, and kernels are interpreted by it: `pip install 'triton>=3.6'`" in capsys.readouterr().err


# -- on a GPU ------------------------------------------------------------------------------------------------------------
there = pytest.mark.skipif(not torch.cuda.is_available() or torch.version.hip is not None, reason="needs an NVIDIA GPU")


@there
def test_an_explanation_of_what_a_gpu_ran():
    with tokamak.scope(strict=True):
        e = tokamak.explain(softmax, torch.randn(64, 1000, device="cuda"))
    found, = e.kernels
    assert found.device.startswith("cuda") and found.how in ("compiled", "cache", "process") and 0 < found.registers <= 255
    assert found.bytes == found.fewest == 2 * 64 * 1000 * F32 and f"{found.registers} registers a thread" in str(e)


@there
def test_what_a_gpu_ran_is_checked():
    x, w, b = (torch.randn(*shape, device="cuda", requires_grad=True) for shape in ((600, 77), (77,), (77,)))
    fn = tokamak.compile(lambda *a: layer_norm(*a) @ a[0].t(), check=True, strict=True)
    fn(x, w, b).sum().backward()
    assert x.grad.isfinite().all()


# -- against the machine's limits ------------------------------------------------------------------------------------------
PEAKS = Peaks("some GPU", ((8192, 1e-9), (1 << 20, 1e-8)), {"float32": 1e12, "bfloat16": 1e14, "float16": 2e14}, 1e-9, "2026-01-01")


@pytest.mark.parametrize("dtype, rows, found", [(torch.bfloat16, 64, "bfloat16"), (torch.float16, 64, "float16"), (torch.bfloat16, 1, "float32")])
def test_products_of_tiles_are_judged_by_the_rate_of_their_type(dtype, rows, found):
    """A kernel of ours with a product in it is no faster than its limit: its FLOPs are made where the machine multiplies tiles; one row is not."""
    x, w = torch.randn(rows, 256, dtype=dtype), torch.randn(128, 256, dtype=dtype)
    graph, = records(lambda x, w: F.linear(x, w).relu(), x, w, contractions="kernels")
    kernel = max(kernels(graph), key=lambda k: k.flops)
    row = limits.kernel_row(kernel, "", (graph.name, 0), 1.0, PEAKS)
    assert kernel.flops > 2 * rows * 256 * 128 * 0.9 and kernel.dtype == row.dtype == found
    assert row.limit == pytest.approx(max(kernel.flops / PEAKS.matmul[found], PEAKS.memory_seconds(kernel.fewest)))


def test_products_side_by_side_are_of_their_type():
    x, w, v = (torch.randn(*s, dtype=torch.bfloat16) for s in ((16, 256), (256, 128), (256, 64)))
    graph, = records(lambda x, w, v: torch.cat((x @ w, x @ v), 1), x, w, v, contractions="kernels")
    product = max(kernels(graph), key=lambda k: k.flops)
    assert product.schedule.startswith("beside(") and product.dtype == "bfloat16"
