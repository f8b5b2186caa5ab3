"""Kernels of the GPU cases as they are planned for an H200: the tool that shows them, and a case on either side of rungs that whole programs show."""
import json
from dataclasses import replace

import pytest
import torch

from benchmarks import gpu_fit, gpu_plans, gpu_sweep
from benchmarks.gpu_sides import steady
from tokamak.codegen import quicker
from tokamak.ir.index import Axis
from tokamak.runtime import gpu_estimate
from tokamak.schedule.neighbours import changed
from tokamak.schedule.tile_schedule import TileSchedule

pytest.importorskip("triton")
EIGHTS, SIXTEENS = "+".join(["8"] * 7), "+".join(["16"] * 13)
TWO_THOUSANDS, WARPS_WIDE = "+".join(["2048"] * 5), "+".join(["32"] * 7)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("case, found", [
    ("evonorm_bwd_bf16_nchw_2000x256x7x7", f"i2:8, i0:8, i3:{EIGHTS}?) split(i0 / 8) warps(8)"),                # equal pieces of a short plane
    ("evonorm_bwd_bf16_nchw_1000x128x14x14", "i2:4, i3:128+64+4)"),                                             # none where a longer one fits
    ("evonorm_bwd_f32_nchw_4248x192x7x7", f"i2:8?, i0:4, i3:{EIGHTS}?) split(i0 / 16) warps(4) stages(3)"),
    ("evonorm_bwd_f32_nchw_3000x96x8x8", "i2:4?, i0:8, i3:64)"),                                                # few channels: no idle ones
    ("evonorm_bwd_f16_nhwc_50x320x14x14", f"i1:{SIXTEENS}?, i3:16?) split(i0 / 8) warps(4)"),
    ("bias_dropout_add_ln_bwd_bf16_919086x38", "i0:8?, i1:2, i2:8+8+8+8+8?)"),
    ("bias_dropout_add_ln_bwd_bf16_200000x100", "i1:64, i2:128?)"),
    ("rmsnorm_middle_f32_1432x8x344", "i0:8, i1:8, i2:64?) warps(4)"), ("rmsnorm_middle_f16_900x16x1024", "i0:4, i1:16, i2:64) warps(1)"),
    ("rmsnorm_middle_bf16_5000x4x300", "i1:4, i2:256?) warps(2)"), ("rmsnorm_middle_bf16_2000x8x500", "i1:8, i2:128?) warps(2)"),
    ("rmsnorm_middle_bf16_671x255x129", "i1:256?, i2:32?) warps(16)"), ("rmsnorm_middle_bf16_1690x144x179", "i1:32+32+32+32+32?, i2:64?)"),
    ("rmsnorm_middle_f16_50x300x1001", "i1:64+64+64+64+64?, i2:32?) warps(8)"),
    ("weightnorm_bwd_bf16_92700x157", "i0:4, i1:32+32+32+32+32?) warps(1)"), ("softmax_bwd_bf16_149932x226", "i0:4, i1:256?) warps(1)"),
    ("layernorm_bf16_1676822x24", "i0:128?, i1:32?) warps(4)"), ("layernorm_bf16_400000x24", "i0:32, i1:32?) warps(4)"),
    ("layernorm_bwd_bf16_19122x124", "i0:4?, i1:128?) split(i0 / 1056) warps(1) stages(3)"),
    ("layernorm_bwd_f32_3001x501", "i0:2?, i1:512?) split(i0 / 264) warps(4) stages(3)"),
    ("layernorm_bwd_f32_100001x287", "i0:8?, i1:64+64+64+64+64?)"), ("layernorm_bwd_f32_100001x257", f"i0:8?, i1:{WARPS_WIDE}+32+32?)"),
    ("layernorm_bwd_bf16_1500x9001", "i1:8192+1024+16?) shifted(i1 % 8) split(i0 / 128) warps(8) stages(1)"),
    ("layernorm_bwd_bf16_1500x8001", "i1:8192+16?) shifted(i1 % 8) split(i0 / 128) warps(16)"),
    ("layernorm_bwd_bf16_3000x9216", f"i1:{TWO_THOUSANDS}?) split(i0 / 132) warps(16)"),
    ("bias_gelu_bwd_f32_199x14288", "i0:4?, i1:512?) split(i0 / 18) warps(4) stages(3)"),
    ("bias_gelu_bwd_bf16_113x85455", "i1:4096+16?) shifted(i1 % 8) split(i0 / 16) warps(8) stages(3)"),
    ("bias_gelu_bwd_f16_100x30001", "i1:4096+16?) shifted(i1 % 8) split(i0 / 16) warps(16) stages(1)"),
    ("sum_outer_bf16_18015x160", "i0:8?, i1:64?) split(i0 / 282) warps(4)"),
    ("sum_outer_f16_17832x126", "i0:16?, i1:64?) split(i0 / 140) warps(1) stages(3)"),
    ("sum_middle_bf16_20x300x1001", "i1:32?, i2:32?) looped(i1) warps(8)"),
    ("sum_middle_f16_100x1000x333", "i1:32?, i2:64?) looped(i1) warps(8)"),
    ("rmsnorm_middle_bwd_f16_238x2014x19", "i1:64+64?, i2:32?) split(i1 / 2) warps(8)"),
    ("batchnorm_bwd_bf16_nchw_55x320x56x56", "i2:4096?) looped(i0, i2) warps(8)"),
    ("groupnorm_bwd_bf16_nhwc_49x1280x32x32", "i2:2, i1:16+16+16+16+16+16+16+16, i3:32+8) staged(i1 / 8) warps(4)"),
    ("instancenorm3d_bwd_bf16_ndhwc_3x24x33x33x33", "i1:32?, i2:16?)"),
    ("instancenorm3d_bwd_bf16_ndhwc_5x8x64x64x64", "i1:8, i2:64) split(i2 / 158) warps(4) stages(3)"),           # no images beside
    ("instancenorm3d_bwd_bf16_ndhwc_6x10x56x60x60", "i1:4?, i2:64)"),                                           # few idle channels
    ("rmsnorm_bwd_f32_625111x22", "i0:32?, i1:16+8?) split(i0 / 1056) warps(4) stages(1)"),
    ("layernorm_bwd_f32_600001x21", "i0:32?, i1:8+8+8?) split(i0 / 1056) warps(4)"),                             # two sums
    ("evonorm_bwd_f32_nchw_28x768x15x15", "i2:8+8+8, i3:256?) split(i0 / 4) warps(8) stages(3)"),
    ("evonorm_bwd_f32_nchw_40x512x13x15", f"i2:16, i3:{SIXTEENS}?) split(i0 / 8) warps(8)"),
    ("evonorm_bwd_bf16_nchw_16x2048x15x14", f"i2:32+32, i3:{WARPS_WIDE}?) staged(i2)"),
    ("batchnorm_bwd_f16_nchw_40x512x20x20", f"i0:16+16+8, i2:{WARPS_WIDE.replace('32', '64')}?) staged(i0)"),   # a longer plane
    ("groupnorm_bwd_bf16_nchw_17x192x56x56", f"i2:8?, i3:{WARPS_WIDE.replace('32', '512')}?) warps(16)"),
    ("sum_outer_f32_80001x36", "i0:256?, i1:64?) split(i0 / 264) warps(8)"), ("sum_outer_f32_60000x40", "i0:128?, i1:64?) split(i0 / 469) warps(4)"),
    ("rmsnorm_bwd_bf16_1729117x23", "i0:32?, i1:8+8+8?) split(i0 / 528) warps(8) stages(1)"),
    ("rmsnorm_bwd_f32_300007x31", "i0:32?, i1:16+16?) split(i0 / 1056) warps(4)"), ("layernorm_bwd_f32_500001x29", "i0:32?, i1:8+8+8+8?)"),
    ("cumsum_middle_bf16_6537x32x211", "i1:32, i2:256?) warps(2)"), ("cumsum_middle_bf16_5000x20x150", "i1:16+4, i2:64?)"),
    ("rmsnorm_f16_93326x716", "i1:512+256+16?) shifted(i1 % 8) split(i0 / 16896) warps(1)"),
    ("rmsnorm_f16_80000x716", "i1:512+256+16?) shifted(i1 % 8) split(i0 / 4224) warps(1)"),
    ("rmsnorm_middle_bf16_3162x634x17", "i1:128+128+128+128+128?, i2:8?)"), ("rmsnorm_middle_bf16_3162x634x33", "i1:128+128+128+128+128?, i2:16?)"),
    ("batchnorm_f32_nchw_410x256x7x7", "i0:32?, i2:64?) split(i0, i2 / 1) warps(16)"),
    ("log_softmax_bf16_262143x63", "i0:16?, i1:32+32?) warps(2)"), ("log_softmax_bf16_262143x51", "i0:8?, i1:8+8+8+8+8+8+8?) warps(2)"),
    ("sum_outer_f16_215x45781", "i0:16?, i1:64?) looped(i0) warps(8)"), ("sum_outer_f16_300x45781", "i0:64?, i1:64?) looped(i0)"),
    ("cumsum_middle_f16_2558x16x947", "i1:16, i2:256?) warps(4)"), ("cumsum_outer_f32_15x262145", "i0:16?, i1:64?) warps(1)"),
    ("rmsnorm_middle_bf16_7001x12x70", "i1:16?, i2:128?) warps(2)"),
    ("modulate_bwd_f16_900x5x5569", "i1:8?, i2:128?) warps(2)"), ("modulate_bwd_f32_26x96x8192", "i1:32+32+32, i2:64) warps(8)"),
    ("modulate_bwd_f16_60x300x5569", "i2:2048?) split(i1 / 2) warps(4) stages(3)"),                             # more rows than are held
    ("modulate_bwd_f32_10x300x8191", "i2:4096+8?) shifted(i2 % 4) split(i1 / 4) warps(16)"),                    # few blocks: programs share them
    ("weightnorm_bwd_f32_1146x27400", f"i1:{'1024+' * 6}1024?) staged(i1 / 4) split(i0 / 30) warps(16) stages(3)"),       # 8 bytes a thread,
    ("layernorm_bwd_f32_2000x21000", f"i1:{'512+' * 5}512?) staged(i1 / 8) split(i0 / 30) warps(8) stages(3)"),
    ("layernorm_bwd_bf16_3000x18000", f"i1:{'2048+' * 4}1024?) staged(i1 / 2) split(i0 / 66) warps(16) stages(3)"),
    ("rmsnorm_bwd_bf16_1200x50000", f"i1:{'1024+' * 6}512?) staged(i1 / 8) split(i0 / 15) warps(8)"),       # few elements to a thread
    ("layernorm_bwd_bf16_2621x25600", f"i1:{'512+' * 6}256?) staged(i1 / 8) split(i0 / 30) warps(4)"),
    ("rmsnorm_bwd_bf16_2048x32768", "i1:1024+1024+1024+1024) staged(i1 / 8) split(i0 / 30) warps(8)"),
    ("batchnorm_bwd_f16_nhwc_8x1024x28x28", "i0:32+32, i1:64) split(i0 / 24) warps(2) stages(1) once"),          # few blocks to a program
    ("batchnorm_bwd_bf16_nhwc", "i0:32+32, i1:64) split(i0 / 99) warps(8)"),
    ("batchnorm_bwd_f32_nhwc_8x1024x28x28", "i0:16+16, i1:64) split(i0 / 24) warps(8)"),
    ("py_layernorm_f32_1500x7000", f"i1:{WARPS_WIDE.replace('32', '1024')}?) warps(8)"), ("py_layernorm_f32_1500x3500", "i1:2048+1024+512?)")])
def test_the_first_kernel_of_a_case(case, found):
    first, *_ = gpu_plans.planned(case)
    assert first["schedule"].startswith(f"tile({found}"), first["schedule"]


@pytest.mark.parametrize("case, found", [
    ("layernorm_bwd_f32_25x310003", "i1:32?, i0:32?) warps(4)"), ("layernorm_bwd_f32_18x500001", "i1:16+2, i0:64?) warps(4)"),      # idle rows
    ("instancenorm3d_bwd_bf16_ndhwc_5x8x64x64x64", "i2:4, i0:256) warps(2)"),
    ("instancenorm3d_bwd_f16_ndhwc_4x16x56x56x56", "i0:64, i1:4, i2:16) warps(8)")])
def test_the_third_kernel_of_a_case(case, found):
    third = gpu_plans.planned(case)[2]
    assert third["schedule"].startswith(f"tile({found}"), third["schedule"]


@pytest.mark.parametrize("case", ["evonorm_bwd_f32_nchw_4248x192x7x7", "evonorm_bwd_f16_nchw_4000x320x7x7", "bias_dropout_add_ln_bwd_f32_400000x38"])
def test_rows_in_equal_pieces_beside_sums_stay_in_registers(case):
    """In pieces of several lengths they spilled up to 432 bytes a thread."""
    assert not any(k["spilled"] for k in gpu_plans.planned(case, build=True))


def test_rows_of_no_power_of_two_leave_tiles_of_some(monkeypatch):
    """Three sums beside 48 elements in pieces of eight: 2048 / 48 rows do not compile."""
    block = gpu_plans.case("bias_dropout_add_ln_bwd_f32_901082x24")
    monkeypatch.setattr(gpu_plans, "case", lambda name: replace(block, recipe=replace(block.recipe, fn=steady(block))))
    assert gpu_plans.planned(block.name)[0]["schedule"].startswith("tile(i0:32?, i1:2, i2:8+8+8) split(i0")


def test_a_piece_of_no_power_of_two_is_a_bug():
    with pytest.raises(AssertionError, match="pieces of .42. elements"):
        TileSchedule((), (), ((Axis(0, 64), (42,)),), frozenset(), (), 1, frozenset(), 1)


def test_the_tool_shows_what_a_change_changes(tmp_path, capsys, monkeypatch):
    """Kernels that an earlier run kept, beside those of now, of the cases alone that have others."""
    monkeypatch.setattr(gpu_plans, "every", lambda names, build, workers: [gpu_plans._planned(n, build) for n in names])
    kept, cases = tmp_path / "kept.json", ["sum_outer_f16_25000x72", "softmax_bf16_4096x512"]
    assert gpu_plans.main(["--cases", *cases, "--json", str(kept)]) == 0
    shown = capsys.readouterr().out
    assert all(f"{case}  " in shown for case in cases)
    rows = json.loads(kept.read_text())
    rows[cases[0]][0]["schedule"] = "tile(i0:1)"
    kept.write_text(json.dumps(rows))
    gpu_plans.main(["--cases", *cases, "--against", str(kept)])
    shown = capsys.readouterr().out
    assert "tile(i0:1)" in shown and cases[1] not in shown and "1 of 2 cases have other kernels" in shown


def test_what_cannot_be_planned_says_why():
    name, said = gpu_plans._planned("no_case", False)
    assert name == "no_case" and said.startswith("ValueError: there is no case")


def test_a_sweep_says_what_the_machine_code_does():
    """Thirty-two warps for rows of 200: estimates tell them from the heuristic's; and the summary what came of it."""
    task = next(gpu_sweep.tasks(gpu_plans.graphs("softmax_f16_40000x200")))
    many = changed(task.body, task.schedule, ("warps(32)",), task.hints)
    few, lots = (gpu_sweep.said(gpu_sweep.terms(task, s)) for s in (task.schedule, many))
    assert 0 < few < lots
    first, second = kernels_of((10.0, 20.0), (5.0, 15.0), (1.0, None)), kernels_of((10.0, 20.0), (5.0, 19.0))
    assert gpu_sweep.picked([first, second, kernels_of((9.0, None))]) == [2.0]
    assert gpu_sweep.picked([first, second | {"gain": 1.0}]) == [2.0, 2.0] and gpu_sweep.picked([first | {"gain": 1.4}]) == []
    assert "10.00 (20.00)  s0" in gpu_sweep.text(first, 1) and "5.00 (15.00)  s1" in gpu_sweep.text(first, 1)


def kernels_of(*timed) -> dict:
    """A row of a sweep: microseconds, and those of the estimate, all of them launch."""
    terms = lambda us: (us * gpu_sweep.CYCLES / gpu_estimate.LAUNCH, *[0.0] * 8) if us is not None else ()
    return {"case": "c", "kernel": "k", "gain": quicker.GAIN, "tried": [(f"s{n}", us, 0, terms(estimate)) for n, (us, estimate) in enumerate(timed)]}


def test_factors_are_found_again(tmp_path, capsys):
    """Of times that are made of them, from a file."""
    made, random = (8000.0, 0.05, 0.7, 0.6, 0.03, 1.5, 0.8, 30.0, 0.2, 0.3, 0.8), torch.Generator().manual_seed(0)
    rows = []
    for n in range(24):
        tried = []
        for _ in range(8):
            most = torch.tensor([3e6, 2e5, 2e5, 4e6, 1e5, 1e5, 2e3, 4.0, 3.0])
            terms = [1.0, *(float(x) for x in torch.rand(9, generator=random, dtype=torch.float64) * most), float(n % 2)]
            tried.append((f"s{len(tried)}", gpu_sweep.said(terms, made), 0, terms))
        rows.append({"case": f"c{n}", "kernel": "k", "gain": quicker.GAIN, "tried": tried})
    assert gpu_fit.fitted(rows) == pytest.approx(made, rel=0.02)
    (tmp_path / "sweep.json").write_text(json.dumps(rows))
    assert gpu_fit.main([str(tmp_path / "sweep.json")]) == 0
    said = capsys.readouterr().out
    assert "24 kernels, 192 schedules" in said and "0.0% off" in said and "copies" in said


def test_no_factor_is_negative():
    """A term that speaks against the times has none."""
    tried = [(f"s{n}", 10.0 + n, 0, (1.0, 1e5 * n, 0.0, 0.0, 0.0, 5e4 / (1 + n), 0.0, 0.0, 0.0)) for n in range(6)]
    found = gpu_fit.fitted([{"case": "c", "kernel": "k", "tried": tried}])
    assert min(found) >= 0 and found[5] < gpu_estimate.SHARED / 10


def test_a_sweep_tries_schedules_that_lower():
    """The heuristic's first, all that differ from it in one thing, then any; rows held in stages by other numbers of programs, too."""
    for case in ("softmax_f16_40000x200", "layernorm_bwd_f32_3001x501", "layernorm_f32_700x200000"):
        task = next(gpu_sweep.tasks(gpu_plans.graphs(case)))
        tried = gpu_sweep.variants(task, 24, 0)
        assert tried[0] is task.schedule and 4 < len(tried) <= 25 and len(set(tried)) == len(tried)
        assert sum(task.parts(s) is not None for s in tried) > len(tried) // 2
        counts = {s.sharers for s in tried}
        assert counts == ({1, 2, 4, 8} if task.schedule.staged is not None else {1})
