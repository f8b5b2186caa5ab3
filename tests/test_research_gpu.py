"""What researchers write beside the libraries' layers (`benchmarks.gpu_research`): right, in few kernels, by schedules of no named layer. A case on
either side of each rung."""
from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks import gpu_drawn, gpu_plans
from benchmarks.gpu_case import shrunk
from benchmarks.gpu_cases import case
from benchmarks.gpu_sides import compiled, forward, gradient, leaves
from tests.large_gpu import right_on_one
from tokamak import backend
from tokamak.codegen import relief
from tokamak.codegen.stages import render_plan
from tokamak.fuse import held_rows, sharing
from tokamak.options import Options
from tokamak.runtime import gpu_build, gpu_code

ROWS, STACK, IMAGES = "300x130", "7x24x70", "nhwc_6x32x9x9"
SIZES = {**dict.fromkeys(gpu_drawn.RESEARCH_ROWS, ROWS), **dict.fromkeys(gpu_drawn.RESEARCH_STACKS, STACK),
         **dict.fromkeys(gpu_drawn.RESEARCH_IMAGES, IMAGES), **dict.fromkeys(gpu_drawn.RESEARCH_HEADS, "3x17x4x24"), "contrastive": "65"}


@pytest.mark.parametrize("family", gpu_drawn.OF["research"])
def test_every_family_in_the_interpreter(family):
    """Outputs and gradients against float64."""
    torch._dynamo.reset()
    made = shrunk(case(f"{family}_f32_{SIZES[family.removesuffix('_bwd')]}"))
    inputs = made.inputs("cpu", seed=torch.seed() % 1000)
    wide = [x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in inputs]
    got, want = forward(made, compiled("tokamak", made.fn, cached=True, target="interpret", strict=True), inputs), forward(made, made.fn, wide)
    pairs = list(zip(got, want, strict=True)) if isinstance(got, tuple) else [(got, want)]
    if made.mode == "backward":
        dy = gradient(got, 0)
        pairs += zip(torch.autograd.grad(got, leaves(inputs), dy), torch.autograd.grad(want, leaves(wide), dy.double()), strict=True)
    for a, b in pairs:
        if a.dtype == torch.int8:           # codes: halves may be rounded either way
            assert (a != b).float().mean() < 0.01
        else:
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4 * float(b.abs().max()) + 1e-7)


@pytest.mark.parametrize("name, count", [
    ("norm_rotary_bf16_246x134x8x192", 1),              # a norm, read at other places of its row: computed there again
    ("masked_mean_bwd_f16_12x568x288", 1), ("masked_huber_bwd_bf16_1461x32x241", 1),        # a quotient of few elements, or of one
    ("cosine_loss_bwd_f16_214x202260", 3),              # one of its sums behind a condition: what elements are made of is made again, not stored
    ("geglu_packed_bwd_bf16_4095x8192", 1), ("geglu_packed_bwd_f16_1000x3168", 1),      # both halves are made where they are put side by side
    ("standardize_columns_bwd_bf16_512x15531", 1), ("standardize_columns_f16_2843x6648", 3), ("softmax_middle_f16_25x511x427", 3)])
def test_how_many_kernels(name, count):
    assert len(gpu_plans.planned(name)) == count


@pytest.mark.parametrize("name, found", [
    ("norm_rotary_bf16_246x134x8x192", "i2:4, i3:64+64+64) warps(1)"), ("rmsnorm_add_bf16_100000x184", "i0:4, i1:256?) warps(4)"),
    ("entropy_bf16_691899x38", "i0:128?, i1:8+8+8+8+8?) flat(104)"), ("sum_inner_bf16_691899x38", "i0:128?, i1:32+8?) flat(104)"),
    ("pooled_statistics_bf16_3x1279x7761", "i1:32+32+32+32+32+32+32+32?, i2:64?) split(i1 / 1) warps(8)"),
    ("pooled_statistics_bf16_3x1279x7760", "i1:16+16+16+16?, i2:64?) split(i1 / 1) warps(2)"),
    ("masked_huber_bf16_2x3903x4903", "i2:1024?) looped(i2) split(i0, i1 / 1056) warps(4)"),
    ("masked_huber_bf16_2x3903x4904", "i2:8192?) looped(i2) split(i0, i1 / 1056) warps(4)"),
    ("smooth_cross_entropy_f32_32768x440", "i0:8, i1:64+64+64+64+64+64+64?) split(i0 / 1056) warps(4)"),
    ("snake_bwd_f16_nchw_33x1024x20x20", "i0:4?, i2:512?) looped(i0, i2)"), ("snake_bwd_f16_nchw_16x1024x14x14", "i0:16, "),
    ("response_norm_bwd_f32_nchw_21749x64x7x7", "i1:64, i2:8+8+8+8+8+8+8?) split(i0 / 264)"),
    ("response_norm_bwd_bf16_nhwc_22x2048x28x28", "i1:64?, i2:64) looped(i1)")])
def test_the_first_kernel(name, found):
    first, *_ = gpu_plans.planned(name)
    assert first["schedule"].startswith(f"tile({found}"), first["schedule"]


def test_a_program_alone_has_more_threads_where_functions_are_heavy():
    *_, last = gpu_plans.planned("contrastive_bf16_1023")
    *_, light = gpu_plans.planned("cross_entropy_bf16_5624x296")
    assert "warps(8)" in last["schedule"] and "warps(1)" in light["schedule"]


@pytest.mark.parametrize("name", ["rotary_bf16_127x1088x4x72", "rotary_f16_8x2853x25x80", "rotary_f32_9x2049x40x32"])
def test_what_lies_on_one_side_of_a_place_is_read_in_words(name):
    """Halves of 36 elements of 16 bits are read by eight bytes."""
    record, = gpu_plans.graphs(name)
    part, = (p for built in render_plan(record.values["lower"]).values() for p in built.parts)
    made = gpu_build.build([part.unit], gpu_plans.H200.arch)[part.unit.name]
    assert not re.search(r"ld\.global\S*\.b16", made.listing)


SPILLING = "gated_rmsnorm_bwd_f32_524287x32"


def test_a_kernel_that_spills_has_another_schedule():
    first, *_ = gpu_plans.planned(SPILLING, build=True)
    assert first["spilled"] >= relief.SPILLED and first["quicker"] == first["schedule"].replace("i0:128?", "i0:64?")


def test_both_components_of_a_fold_are_carried():
    """The maxima of columns bring the sums of their exponentials along: too much beside rows of that length, which are held by themselves."""
    first, *_ = gpu_plans.planned("double_softmax_f16_1701x31933")
    assert "split" not in first["schedule"] and "staged(i1)" in first["schedule"]
    first, *_ = gpu_plans.planned("double_softmax_f16_1701x8001")
    assert first["schedule"].startswith("tile(i1:8192+16?) shifted(i1 % 8) split(i0 / ")


@pytest.mark.parametrize("name, found", [
    ("ada_layernorm_bwd_f16_1283x1025x31", "i1:128+128+128+128+128+128+128+128+128?, i2:16+16?) warps(16)"),
    ("ada_layernorm_bwd_bf16_13568x88x33", "i1:16+16+16+16+16+16?, i2:16+16+16?) staged(i1) warps(4)")])
def test_held_rows_that_spill_are_in_equal_pieces(name, found, monkeypatch):
    monkeypatch.setattr(held_rows, "CROSSED_HELD", sharing.HELD)             # held whole, though programs that carry the sums of columns do better
    first, *_ = gpu_plans.planned(name, build=True)
    assert first["spilled"] >= relief.SPILLED and first["quicker"].startswith(f"tile({found}"), first


def test_folds_of_coordinates_hold_no_row():
    """The gradient of a loss with smoothed labels sums where a label is, and nothing that it reads: that was a bug of ours for long rows."""
    assert len(gpu_plans.planned("smooth_cross_entropy_bwd_bf16_100x72642")) == 1


def _machine():
    return replace(gpu_plans.H200, name="cuda:0")


def test_the_program_is_that_of_the_other_schedule(monkeypatch):
    """Whatever was planned for the first one is planned again, once; where nothing spills, nothing is."""
    record = gpu_plans.graphs(SPILLING)[-1]
    lowered, said, built = record.values["lower"], [], []
    text = render_plan(lowered)
    spilled = {p.unit.name: 232 if n == 0 else 0 for n, p in enumerate(p for b in text.values() for p in b.parts)}
    unknown = gpu_code.Waits(0, 0, 0)
    kernels = {name: SimpleNamespace(binary=SimpleNamespace(spilled=s, waits=unknown)) for name, s in spilled.items()}

    def stand_in(units, arch, **_):
        built.append(units)
        return {u.name: SimpleNamespace(spilled=0 if n else 232, shared=0) for n, u in enumerate(units)}
    monkeypatch.setattr(gpu_build, "build", stand_in)
    monkeypatch.setattr(backend, "_gpu_kernels", lambda built, *_: dict.fromkeys(p.unit.name for b in built.values() for p in b.parts))
    monkeypatch.setattr(backend, "_TAKEN", {})
    finish = lambda made, trace: (render_plan(made), (), "another program")
    run = lambda kernels: backend._relieved(lowered, text, "program", kernels, finish, _machine(), Options(cache_dir=""), lambda *x: said.append(x))
    made, program, found = run(kernels)
    assert program == "another program" and said == [("heuristic", lowered), ("lower", made)]
    changed = [g for g in lowered.bodies if made.bodies[g][1] != lowered.bodies[g][1]]
    assert len(changed) == 1 and not set(spilled) >= set(found) and len(built) == 1
    assert run(kernels)[0].bodies[changed[0]][1] == made.bodies[changed[0]][1] and len(built) == 1          # it is not looked for again
    alone = backend._relieved(lowered, text, "program", kernels, finish, _machine(), Options(cache_dir="", tuned=False), lambda *x: said.append(x))
    assert alone == (lowered, "program", kernels)           # `tokamak tune` sees the heuristic's schedules, by which what it finds is known
    whole = {name: SimpleNamespace(binary=SimpleNamespace(spilled=0, waits=unknown)) for name in spilled}
    assert run(whole) == (lowered, "program", whole)


def test_what_has_been_timed_stays():
    """A schedule that `tokamak tune` found is the fastest with all that it spills."""
    lowered = gpu_plans.graphs(SPILLING)[-1].values["lower"]
    spilled = {p.unit.name: 232 for b in render_plan(lowered).values() for p in b.parts}
    tried = {g: (b, replace(s, measured=True)) for g, (b, s) in lowered.bodies.items()}
    kernels = {g: tuple(replace(k, schedule=tried[g][1]) if k.schedule == lowered.bodies[g][1] else k for k in ks)
               for g, ks in lowered.kernels.items()}
    assert relief.spilling(lowered, spilled) and not relief.spilling(replace(lowered, bodies=tried, kernels=kernels), spilled)


@pytest.mark.parametrize("name, last", [("layernorm_bwd_bf16_4096x1024", True), ("evonorm_bwd_f16_nhwc_50x320x14x14", False)])
def test_equal_pieces_come_last_where_a_row_is_one_piece(name, last):
    """They are what the compiler takes longest for, and mend nothing but pieces of several lengths or idle lanes."""
    lowered = gpu_plans.graphs(name)[-1].values["lower"]
    found = ([way[0].partition("(")[0] for way in relief.ways(b, s)] for b, s in lowered.bodies.values())
    kinds = next(kinds for kinds in found if "even" in kinds)
    assert (kinds.index("even") > kinds.index("warps")) == last, kinds


def test_where_nothing_spills_less_the_first_stays(monkeypatch):
    record = gpu_plans.graphs(SPILLING)[-1]
    lowered = record.values["lower"]
    groups = relief.spilling(lowered, {p.unit.name: 232 for b in render_plan(lowered).values() for p in b.parts})
    asked, taken = [], {}

    def all_alike(units):
        asked.extend(units)
        return {u.name: SimpleNamespace(spilled=232, shared=0) for u in units}
    assert len(groups) >= 1
    assert relief.relieved(lowered, groups, gpu_plans.H200, all_alike, taken).bodies == lowered.bodies
    assert set(taken.values()) == {()} and len({u.name for u in asked}) > sum(relief.AT_ONCE)


@pytest.mark.parametrize("name, shifted", [
    ("softmax_bf16_53691x298", False), ("softmax_f16_40302x397", False),        # as they lie: two pieces of words, folded twice
    ("softmax_bf16_31311x511", True), ("softmax_bf16_21333x750", True),         # one piece, and more elements
    ("softmax_bwd_f16_40302x397", True), ("rmsnorm_bf16_35555x450", True),      # one fold
    ("softmax_f32_65536x395", True),
    ("rmsnorm_add_bf16_15655x1022", False), ("gated_rmsnorm_f16_21333x750", False),      # several matrices at words of 4 bytes, a weight beside
    ("rmsnorm_add_bf16_15640x1023", True), ("rmsnorm_add_f32_15655x1022", True), ("rmsnorm_bf16_10457x1530", True),
    ("rmsnorm_add_bf16_7000x2050", True)])
def test_short_rows_that_are_read_as_they_lie(name, shifted):
    assert ("shifted(" in gpu_plans.planned(name)[0]["schedule"]) == shifted


@pytest.mark.parametrize("name, found", [
    ("smooth_cross_entropy_bwd_bf16_21333x750", "tile(i0:2?, i1:512+256?) warps(1)"),               # as they lie
    ("focal_bwd_f16_53691x298", "tile(i0:2?, i1:256+64?) warps(1)"),
    ("norm_turned_bwd_bf16_75x160x1704", "tile(i1:8, i2:1024+1024?) warps(8)")])                     # in pieces that are words both ways
def test_what_is_quicker_by_the_estimate(name, found):
    assert gpu_plans.planned(name, build=True)[0]["quicker"].startswith(found)


@pytest.mark.parametrize("name", ["cosine_loss_bwd_f32_3x2051", "softmax_bf16_7x298", "distillation_bwd_f32_5x397",
                                  "standardize_columns_bwd_f32_130x35"])
def test_rows_as_they_lie_and_reciprocals_beside_a_loop_are_right(monkeypatch, name):
    assert right_on_one(monkeypatch, name)
