"""What lies along one axis and is read or written along another (`benchmarks.gpu_layouts`): right, and in whole sectors of memory."""
from __future__ import annotations

import pytest
import torch

from benchmarks import gpu_drawn, gpu_plans
from benchmarks.gpu_cases import case
from benchmarks.gpu_sides import compiled, forward, gradient, leaves
from tests.large_gpu import right_on_one
from tokamak.fuse.axes import Group

SIZES = {**dict.fromkeys(gpu_drawn.LAYOUT_STACKS, ("3x40x37", "2x24x700")),
         **dict.fromkeys(gpu_drawn.LAYOUT_IMAGES, ("2x64x9x10", "2x96x7x7", "1x32x11x5")),
         "heads_apart": ("3x17x4x24",), "heads_joined": ("3x4x17x24",), "position_softmax": ("3x9x21", "2x16x33"), "window_norm": ("2x2x96",)}


@pytest.mark.parametrize("dtype, rtol", [("f32", 1e-4), ("bf16", 3e-2)])
@pytest.mark.parametrize("family, sizes", [(f, s) for f in gpu_drawn.OF["layouts"] for s in SIZES[f.removesuffix("_bwd")]])
def test_every_family_in_the_interpreter(family, sizes, dtype, rtol):
    """Outputs and gradients against float64."""
    torch._dynamo.reset()
    made = case(f"{family}_{dtype}_{sizes}")
    inputs = made.inputs("cpu", seed=torch.seed() % 1000)
    wide = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    got, want = forward(made, compiled("tokamak", made.fn, cached=True, target="interpret", strict=True), inputs), forward(made, made.fn, wide)
    assert got.stride() == want.stride()
    pairs = [(got, want)]
    if made.mode == "backward":
        dy = gradient(got, 0)
        pairs += zip(torch.autograd.grad(got, leaves(inputs), dy), torch.autograd.grad(want, leaves(wide), dy.double()), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a.double(), b, rtol=rtol, atol=rtol * float(b.detach().abs().max()) + 1e-7)


def words(name: str) -> list[str]:
    """The schedules of a case's kernels as they are planned for an H200."""
    return [k["schedule"] for k in gpu_plans.planned(name)]


@pytest.mark.parametrize("name, found", [
    # a result that is written across its rows: whole sectors of it; rows that are too long for that are run through
    ("norm_turned_bf16_233x91x128", "tile(i1:32?, i2:128) warps(8)"),
    ("norm_turned_bf16_2000x7x128", "tile(i1:8?, i2:128)"),
    ("norm_turned_bf16_52x256x2192", "tile(i1:16, i2:128+128+"),
    ("norm_turned_bf16_52x256x4096", "tile(i1:32, i2:128) looped(i2) warps(8) stages(4)"),
    # all rows of what is written across short ones; few rows of longer ones, whole, in one kernel
    ("norm_turned_bf16_24092x40x24", "tile(i1:32?, i2:64?) warps(4)"), ("rmsnorm_both_f32_4x272x1796", "tile(i1:8, i2:128+128+"),
    # sums beside such rows: pieces of one length, tiles under way where rows begin at words both ways, the whole plane where it is small
    ("norm_turned_bwd_bf16_50x2810x128", "tile(i1:128, i2:16?) split(i0, i2 / 528) warps(4) stages(1)"),
    ("norm_turned_bwd_f32_57395x8x96", "tile(i1:8, i2:32+32+32) split(i0 / 528) warps(4) stages(3)"),
    ("norm_turned_bwd_f16_19x3898x512", "tile(i1:512, i2:8?) split(i0, i2 / 528) warps(4) stages(1)"),
    ("patch_norm_bwd_bf16_31x768x16x16", "tile(i1:8, i2:128+128+128+128+128+128) split(i0, i1 / 264) warps(8) stages(3)"),
    ("patch_norm_bwd_f16_35275x32x8x8", "tile(i1:32, i2:64) split(i0 / 528)"),
    # what is read across: half sectors will do; fewer tiles under way where they are large
    ("patch_norm_bf16_26x640x32x32", "tile(i1:128+128+128+128+128, i2:16) warps(4)"),
    ("patch_norm_bf16_31x2048x16x16", "tile(i1:8, i2:2048) warps(8)"),
    # rows that are run through are read a turn ahead where nothing copies them, by smaller tiles of several values; turns of few programs are long
    ("norm_turned_bwd_f32_714x32x3094", "tile(i1:16, i2:128?) looped(i2) warps(8) stages(1) ahead"),
    ("norm_turned_bwd_bf16_17x1343x2380", "tile(i1:8?, i2:256?) looped(i2) warps(8) stages(1) ahead"),
    ("norm_turned_bf16_39x32x4095", "tile(i1:16, i2:256?) looped(i2) warps(8) stages(1) ahead"),
    ("norm_turned_f32_7x257x5142", "tile(i1:8?, i2:512?) looped(i2) warps(8) stages(4)"),
    ("columns_scored_bf16_435x9x8193", "tile(i1:8?, i2:256?) looped(i2) warps(4) stages(1)"),
    ("columns_scored_f16_31x32x2047", "tile(i1:8, i2:512?) looped(i2) warps(8) stages(1)"),
    ("columns_scored_f16_153x173x2035", "tile(i1:32?, i2:64?) looped(i2) warps(4) stages(1)"),
    # those that are only folded and begin anywhere have one piece, or few
    ("columns_scored_f16_50x500x385", "tile(i1:512?, i2:16?) warps(4)"),
    ("columns_scored_bf16_5x4097x358", "tile(i1:64+64+64+64+64+64?, i2:32?) warps(4)"),
    ("columns_scored_f16_5482x11x83", "tile(i1:8?, i2:32+32+32?) warps(1)"),
    # and so are rows beside which sums are carried, sectors across them of what programs do not sum over, or as few as there are
    ("norm_turned_bwd_bf16_352x592x184", "tile(i1:64+64+64?, i2:16) split(i0, i2 / 528) warps(4) stages(1) ahead"),
    ("norm_turned_bwd_f32_44709x11x45", "tile(i1:16?, i2:16+16+16?) split(i0 / 528) warps(4) stages(1) ahead"),
    ("norm_turned_bwd_bf16_15546x40x24", "tile(i1:16?, i2:8+8+8) split(i0 / 176) warps(4) stages(1) ahead"),
    ("norm_turned_bwd_f16_6000x24x80", "tile(i1:32?, i2:32+32+32?) split(i0 / 528) warps(4) stages(3)"),
    ("norm_turned_bwd_bf16_19927x5x65", "tile(i0:8?, i2:16+16+16+16+16?) split(i0 / 211) warps(4) stages(1) ahead"),
    ("patch_norm_bwd_bf16_2258x96x15x15", "tile(i1:32+32+32, i2:16?) split(i0, i2 / 528) warps(4) stages(1) ahead"),
    # what is summed and written, too, is whole lines
    ("heads_apart_bwd_bf16_12x500x16x96", "tile(i3:16?, i4:128?) split(i1, i3 / 44) warps(2) stages(1)"),
    ("heads_apart_bwd_bf16_30x512x12x64", "tile(i3:32, i4:64) split(i1, i3 / 58) warps(2) stages(1)"),
    ("heads_apart_bwd_f32_40x256x8x72", "tile(i3:64, i4:64?)"),
    # heads enough for a sector, or too few for anything
    ("position_softmax_bf16_16x16x512", "tile(i1:16, i3:512) warps(4)"), ("position_softmax_bf16_64x4x512", "tile(i2:2, i3:512) warps(1)"),
    # one value along the rows, made of two; two of them
    ("position_softmax_f32_1x40x513", "tile(i0:16?, i2:512+1) warps(4)"), ("norm_turned_bwd_f32_397x15x513", "tile(i1:8?, i2:512+1)"),
    # pieces of rows that are no power of two; long ones are one, with few idle lanes
    ("rmsnorm_both_bf16_3909x16x261", "tile(i1:16, i2:32+32+32+32+32+32+32+32+32?)"),
    ("columns_scored_bf16_334x52x1023", "tile(i1:8?, i2:1024?) warps(4)"),
    ("columns_scored_bf16_153x173x2305", "tile(i1:32?, i2:64?) looped(i2) warps(4) stages(1)"),
    # short rows across which something lies that begins anywhere; which begins at words; which is not written; with idle lanes
    ("norm_turned_f16_3000x129x63", "tile(i1:16+16+16+16?, i2:32?) warps(4)"), ("norm_turned_bf16_4000x255x31", "tile(i1:16+16?, i2:32?) warps(2)"),
    ("norm_turned_f32_5433x255x31", "tile(i1:32?, i2:16?) warps(2)"), ("norm_turned_f32_2000x511x24", "tile(i1:32?, i2:16?) warps(4)"),
    ("columns_scored_f32_583x2047x56", "tile(i1:64?, i2:16?) warps(4)"), ("columns_scored_bf16_300x1023x40", "tile(i1:32+32?, i2:32?) warps(4)"),
    ("norm_turned_f16_3000x128x64", "tile(i1:64, i2:32) warps(4)"), ("norm_turned_f32_2000x511x20", "tile(i1:16+4, i2:16?) warps(1)"),
    ("position_softmax_f32_40x15x31", "tile(i1:16?, i3:32?) warps(1)"),
    # groups of few channels beside each other, or apart from what is written
    ("groupnorm_tokens_bf16_23x2048x32x32", "tile(i2:256+256+256+256, i3:32+32) staged(i2)"),           # contiguous one way, and the other
    ("groupnorm_tokens_f32_23x1024x32x32", "tile(i2:256+256+256+256, i3:32) staged(i2)"),
    ("groupnorm_tokens_bf16_227x128x28x28", "tile(i1:4, i2:4, i3:512+256+16) warps(8)"), ("groupnorm_tokens_f32_149x96x40x40", "tile(i1:4096+1024?)"),
    # pixels shuffled together are counted as one; apart, threads go on along the next axis
    ("pixels_shuffled_f16_117x512x20x20", "tile(i1:1024) warps(2)"), ("pixels_shuffled_bwd_f16_731x256x14x14", "tile(i0:2, i1:512) warps(2)"),
    ("pixels_shuffled_bwd_f16_200x768x15x15", "tile(i4:16?, i2:2, i3:16?)"),            # pieces of no whole words,
    ("pixels_shuffled_bwd_f16_60x1280x13x13", "tile(i4:16?, i2:2, i3:16?)"),            # but of planes of which tiles would idle
    ("pixels_shuffled_bwd_f16_60x1280x11x11", "tile(i0:2, i1:512) warps(2)"), ("pixels_shuffled_bwd_f16_95x640x5x5", "tile(i0:2, i1:512?) warps(2)"),
    ("pixels_shuffled_bwd_f16_95x640x7x7", "tile(i4:8?, i2:2, i3:8?) warps(1)"),
    # pieces of 80 bytes written beside each other, but beside one sum alone
    ("heads_apart_bwd_f16_24x1025x40x40", "tile(i2:2, i3:64?, i4:64?) split(i1, i3 / 8)"),
    ("heads_apart_bwd_f16_24x1025x40x48", "tile(i3:64?, i4:64?) split(i1, i3 / 8)"),
    # a square, less of it where lanes would be idle, and of 32 bits
    ("formats_added_bf16_84x128x16x16", "tile(i1:64, i2:64) warps(8)"), ("formats_added_bf16_84x96x16x16", "tile(i1:32, i2:64) warps(4)"),
    ("formats_added_f32_84x128x16x16", "tile(i1:32, i2:32) warps(4)"),
    # lines that begin within sectors are longer, of many tiles with few idle lanes
    ("formats_added_f16_453x768x14x14", "tile(i1:128?, i2:64)"), ("columns_scored_bwd_bf16_206x32x8191", "tile(i1:32, i2:128?)"),
    ("columns_scored_bwd_bf16_6x464x1147", "tile(i1:64?, i2:64?)"), ("columns_scored_bwd_bf16_190x513x600", "tile(i1:64?, i2:128?)"),
    # and short ones that are written are whole, or twice as long
    ("columns_scored_bwd_f32_32362x16x78", "tile(i2:64+16?, i0:2, i1:16) warps(2)"),
    ("columns_scored_bwd_f32_238x1186x94", "tile(i1:128?, i2:64?) warps(4)"),
    ("columns_scored_bwd_bf16_476x1186x94", "tile(i1:64?, i2:128?) warps(8)"),
    ("columns_scored_bwd_f32_900x150x150", "tile(i1:128?, i2:32?) warps(2)"),
    ("columns_scored_bwd_f32_32362x16x80", "tile(i2:32?"), ("columns_scored_bwd_f32_24x1186x94", "tile(i1:32?, i2:64?)"),   # whole sectors; few tiles
    # several rows are not held for their biases' sake, but where they are few or all they read is little
    ("position_softmax_bwd_bf16_103x3x127", "tile(i0:4?, i2:16+16+"), ("position_softmax_bwd_bf16_64x4x128", "tile(i0:32, i2:128) split(i0 / 1)"),
    ("position_softmax_bwd_bf16_16x8x64", "tile(i0:16, i2:64)"), ("position_softmax_bwd_bf16_24x2x128", "tile(i0:16+8, i2:128)"),
    ("position_softmax_bwd_bf16_91x12x256", "tile(i0:16?, i2:256) split(i0 / 1)")])
def test_rungs(name, found):
    assert words(name)[0].startswith(found)


@pytest.mark.parametrize("name, kernel, found", [
    ("pixels_shuffled_bwd_f16_5x768x40x40", 1, "tile(i0:2?, i2:2048?) looped(i0, i2)"),         # runs of planes, few of them idle
    ("pixels_shuffled_bwd_bf16_68x480x14x14", 1, "tile(i0:16?, i2:256?) looped(i0, i2)"),
    ("pixels_shuffled_bwd_bf16_64x480x14x14", 1, "tile(i0:32, i2:256?) looped(i0, i2)"),
    ("masked_mean_bwd_f16_33x1025x432", 0, "tile(i1:16?, i2:128+16) warps(4)"),                 # nothing read element by element
    ("masked_mean_bwd_bf16_18x4096x120", 0, "tile(i1:32, i2:128?) warps(8)")])
def test_tiles_of_planes_and_of_what_is_spread(name, kernel, found):
    assert words(name)[kernel].startswith(found)


@pytest.mark.parametrize("name, count", [
    ("groupnorm_tokens_bf16_227x128x28x28", 1), ("groupnorm_tokens_f32_149x96x40x40", 2),   # whole sectors are written by one kernel, or another
    ("rmsnorm_both_f16_43x280x256", 1),                                 # rows enough, 16 a program
    ("norm_turned_bwd_bf16_52x256x1024", 2),                            # sums beside rows across which something lies
    ("norm_turned_bwd_f32_52x256x1024", 3),                             # but not of longer rows than are held beside them,
    ("norm_turned_bwd_bf16_1x651x3256", 4),                             # nor beside few
    ("patch_norm_f32_165x2048x15x15", 1),                               # the first element of a row is there before the sum of which it is one
    ("patch_norm_bwd_f16_35275x32x8x8", 2),                             # those of positions, too, of a plane that is held
    ("pixels_shuffled_bwd_bf16_38x512x14x14", 2)])                      # nor of what lies interleaved
def test_how_many_kernels(name, count):
    assert len(words(name)) == count


@pytest.mark.parametrize("name", ["norm_turned_bwd_f32_9x70x65", "norm_turned_bwd_bf16_11x130x33", "norm_turned_bwd_f32_40x8x96",
                                  "patch_norm_bwd_f32_5x48x9x9", "patch_norm_bwd_bf16_7x32x8x8", "patch_norm_bwd_f32_5x64x16x16"])
def test_sums_beside_rows_across_which_something_lies(monkeypatch, name):
    """Right, planned for a GPU of one multiprocessor, whose programs take many rows one behind the other."""
    schedules = right_on_one(monkeypatch, name)
    assert any(s.split and len(s.dims) == 2 and s.order[-1] in s.dims for s in schedules), schedules


def test_what_no_program_holds_is_traded_without_a_circle(monkeypatch):
    """Folds of a group's pixels, whose rows are held apart, and what is made of them would each have needed the other."""
    assert right_on_one(monkeypatch, "groupnorm_tokens_bwd_bf16_1x192x28x28")


@pytest.mark.parametrize("name, stages", [
    ("patch_norm_bwd_bf16_20x512x56x56", 3), ("norm_turned_bwd_f32_57395x8x96", 3), ("norm_turned_bwd_bf16_3000x64x58", 1),
    ("norm_turned_bwd_bf16_3000x64x64", 1),
    ("norm_turned_bwd_bf16_52x256x1024", 1), ("norm_turned_bwd_f16_19x3904x512", 1)])
def test_tiles_under_way_of_sums_that_are_read_both_ways(name, stages):
    """Rows that begin at words of 4 bytes alone would be copied word by word; what lies across and is summed as it is would be read from a copied
    tile by all threads of a warp from one bank, where its pieces are long."""
    found = words(name)
    assert "split" in found[0] and f"stages({stages})" in found[0]


@pytest.mark.parametrize("name, found", [
    ("norm_turned_f32_6325x7x1134", "i1:8?, i2:1024+128?)"), ("norm_turned_bf16_6325x3x1024", "i1:4?, i2:1024)"),
    ("norm_turned_f32_900x5x9134", "i1:8?, i2:512?) looped")])
def test_planes_of_less_than_a_sector_are_written_whole(name, found):
    """By a program each, not row by row."""
    assert found in words(name)[0]


@pytest.mark.parametrize("name", ["norm_turned_bf16_2x9x5001", "norm_turned_bwd_bf16_2x9x3001", "norm_turned_bwd_bf16_1x8x5001",
                                  "norm_turned_bwd_f32_80x11x45", "norm_turned_bwd_f16_9x65x44"])
def test_what_is_read_a_turn_ahead_is_right(monkeypatch, name):
    """In loops over rows, whose last turn is whole or is not, and over what programs share."""
    assert any(s.ahead for s in right_on_one(monkeypatch, name))


def test_planes_of_less_than_a_sector(monkeypatch):
    assert right_on_one(monkeypatch, "norm_turned_f32_5x7x134") and right_on_one(monkeypatch, "norm_turned_bf16_4x3x130")


@pytest.mark.parametrize("name", ["norm_turned_bf16_5x33x31", "norm_turned_f16_4x65x63", "norm_turned_f32_5x33x24", "columns_scored_f32_3x35x56",
                                  "groupnorm_tokens_f32_1x1024x16x16", "groupnorm_tokens_bf16_1x2048x24x16"])
def test_what_lies_across_short_rows_and_groups_is_right(monkeypatch, name):
    assert right_on_one(monkeypatch, name)


def test_no_way_reads_an_element_of_each_sector():
    """What `quicker` tries keeps whole sectors along every axis on which something lies."""
    made = gpu_plans.planned("position_softmax_bf16_16x16x512", build=True)
    assert "i1:16" in made[0].get("quicker", made[0]["schedule"])


def test_a_bias_of_positions_that_later_layers_read_stands_apart():
    """Beside the first layer's softmax programs would hold the batch."""
    torch._dynamo.reset()

    def first(scores, table, place):
        b = torch.nn.functional.embedding(place, table).permute(2, 0, 1)[None]
        return torch.softmax((scores + b).float(), -1).type_as(scores), b
    inputs = torch.empty(16, 16, 64, 64, dtype=torch.bfloat16), torch.empty(32, 16, dtype=torch.bfloat16), torch.zeros(64, 64, dtype=torch.int64)
    with gpu_plans.planning() as recorder:
        torch.compile(first, backend="tokamak", dynamic=False, options={"target": "interpret", "strict": True})(*inputs)
    (graph,) = recorder.graphs
    folds = [sum(bool(m.bound) for m in g.members) for g in graph.values["lower"].plan.steps if isinstance(g, Group)]
    assert folds == [0, 2]
