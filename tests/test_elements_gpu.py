"""How much of a tile each thread has on a large GPU: less where more is computed of it, or read beside it. A case on either side of each rung."""
from __future__ import annotations

import pytest

from benchmarks import gpu_plans
from tests.large_gpu import LARGE, alike
from tokamak.codegen.stages import schedule_plan
from tokamak.fuse import held_rows, sharing
from tokamak.fuse.plan import plan
from tokamak.ir.parse import parse_graph


def schedule(name: str, kernel: int) -> str:
    return gpu_plans.planned(name)[kernel]["schedule"]


@pytest.mark.parametrize("name, kernel, found", [
    ("standardize_columns_bwd_bf16_5008x2139", 2, "tile(i0:1024?) warps(8)"), ("logsumexp_bwd_f16_97958x63", 0, "tile(i0:1024?) warps(4)"),
    ("bias_gelu_bf16_5622x255", 0, "tile(i0:1024?) warps(2)"), ("bias_gelu_f32_508x6166", 0, "tile(i0:1024?) warps(2)"),
    ("swiglu_f16_129x15233", 0, "tile(i0:1024?) warps(2)"), ("snake_bf16_nchw_674x512x14x14", 0, "tile(i1:1024) warps(2)"),
    ("rotary_bf16_374x33x3x112", 0, "tile(i0:128?, i1:8) warps(4)"), ("rotary_f32_85x93x1x112", 0, "tile(i0:256?, i1:4) warps(4)"),
    ("modulate_bf16_2x341x4192", 0, "tile(i0:128?, i1:8) warps(2)"), ("bias_gelu_f32_7327x112", 0, "tile(i0:256?, i1:4) warps(4)")])
def test_what_lies_beside_elements_counted_as_one_axis(name, kernel, found):
    """Few where wider values are read by columns, or some values by rows, or many words."""
    assert schedule(name, kernel).startswith(found)


@pytest.mark.parametrize("name, found", [
    ("layernorm_bf16_500000x32", "i0:128?, i1:32) warps(8)"), ("softmax_bf16_318991x32", "i0:128?, i1:16+16) warps(8)"),
    ("cosine_bwd_f32_200000x32", "i0:128?, i1:16+16) warps(8)"), ("cosine_loss_bwd_f16_182666x16", "i0:256?, i1:8+8) warps(8)"),
    ("rmsnorm_bf16_181083x16", "i0:256?, i1:16) warps(4)"), ("rmsnorm_bf16_65536x128", "i0:8, i1:128) warps(2)"),
    ("ada_layernorm_f16_5000x20x64", "i1:32?, i2:64) warps(4)"), ("ada_layernorm_bf16_10367x27x48", "i1:32?, i2:64?) warps(4)"),
    ("ada_layernorm_bf16_4000x65x48", "i1:16?, i2:64?) warps(4)")])
def test_short_rows_at_words(name, found):
    """Little of each where much is folded; all rows of a matrix with few."""
    assert schedule(name, 0).startswith(f"tile({found}")


@pytest.mark.parametrize("name, found", [
    ("softmax_middle_bf16_500x1000x24", f"i1:{alike(64, 16)}?, i2:16?) warps(8)"),
    ("rmsnorm_middle_f16_800x500x40", "i1:512?, i2:32?) warps(16)"),                        # one sum
    ("standardize_columns_bwd_f32_464x16384", f"i0:{alike(64, 8)}?, i1:16) warps(8)"),
    ("masked_softmax_bf16_3929x63x33", f"i1:{alike(8, 8)}?, i2:64?) warps(4)"),                       # columns that begin anywhere
    ("masked_softmax_bf16_327x127x1031", f"i1:{alike(8, 16)}?, i2:64?) warps(8)"),
    ("softmax_middle_bf16_4x204x30011", f"i1:{alike(32, 7)}?, i2:"),                                  # more than DOWN rows
    ("scale_norm_bwd_f16_82x263497", "i0:128?, i1:32?)"), ("scale_norm_bwd_f16_40x200001", f"i0:{alike(8, 5)}, i1:32?)")])
def test_columns_of_which_much_is_folded(name, found):
    assert schedule(name, 0).startswith(f"tile({found}")


def test_matrices_that_are_held_along_both_axes_have_few_idle_lanes(monkeypatch):
    monkeypatch.setattr(held_rows, "CROSSED_HELD", sharing.HELD)
    assert schedule("ada_layernorm_bwd_f32_1774x132x208", 0).startswith(f"tile(i1:{alike(16, 9)}?, i2:{alike(32, 7)}?) warps(16)")


@pytest.mark.parametrize("name, found", [
    ("standardize_columns_bwd_f16_30000x200", "i0:32+32?, i1:8) split(i0 / 126)"), ("standardize_columns_bwd_bf16_50024x65", "i0:32+32?, i1:16?)"),
    ("standardize_columns_bwd_f32_100000x64", "i0:16+16, i1:64)"), ("standardize_columns_bwd_bf16_262143x15", "i0:128+128?, i1:16?)"),
    ("batchnorm_bwd_bf16_nhwc_50x200x20x20", "i0:32+32?, i1:64?)")])
def test_three_sums_of_columns_that_are_no_whole_tiles(name, found):
    """Narrow ones, as many programs as share whole ones."""
    assert schedule(name, 0).startswith(f"tile({found}")


@pytest.mark.parametrize("name, kernel, found", [
    ("standardize_columns_bwd_bf16_350131x19", 0, "i0:32+32?, i1:8?)"), ("standardize_columns_bwd_f16_200001x23", 0, "i0:32+32?, i1:8?)"),
    ("standardize_columns_bwd_f32_300000x19", 2, "i0:16+16, i1:8?)"),                       # two sums
    ("standardize_columns_bwd_f16_100000x32", 0, "i0:64+64?, i1:32)"), ("standardize_columns_bwd_f32_300000x32", 2, "i0:64?, i1:32)")])
def test_several_sums_of_few_columns(name, kernel, found):
    """Narrow tiles where many lanes of one would be idle, not where none is."""
    assert schedule(name, kernel).startswith(f"tile({found}")


@pytest.mark.parametrize("name, found", [
    ("sum_middle_f16_4783x520x24", f"i1:{alike(32, 17)}?, i2:32?) warps(8)"),
    ("sum_middle_f16_4783x300x24", f"i1:{alike(32, 10)}?, i2:32?) warps(4)"),
    ("sum_middle_bf16_1500x1500x24", "i1:256?, i2:32?) looped(i1) warps(4) stages(2)"),
    ("sum_middle_f16_2500x640x40", f"i1:{alike(64, 10)}, i2:32?) warps(8)"),
    ("sum_middle_bf16_3000x300x48", "i1:16?, i2:64?) looped(i1) warps(1)"),                 # two tiles of few rows
    ("sum_middle_f16_300x1500x24", "i1:256?, i2:8) looped(i1) warps(4)"),                   # few programs
    ("sum_middle_f16_4783x520x32", "i1:32?, i2:32) looped(i1) warps(1)")])                  # no lanes idle
def test_columns_fewer_than_a_tile_has(name, found):
    """Whole lines of many matrices: a sector is read by one program."""
    assert schedule(name, 0).startswith(f"tile({found}")


@pytest.mark.parametrize("name, found", [
    ("rmsnorm_middle_f32_60x127x2001", f"i1:{alike(16, 8)}?, i2:64?) warps(16)"), ("rmsnorm_middle_f32_20x256x4001", f"i1:{alike(32, 8)}, i2:32?)"),
    ("softmax_middle_f32_40x255x1501", f"i1:{alike(32, 8)}?, i2:32?)"), ("rmsnorm_middle_f32_60x127x2000", "i1:128?, i2:64?)"),     # at words
    ("rmsnorm_middle_f32_100x64x2001", "i1:64, i2:64?)"), ("rmsnorm_middle_bf16_100x255x500", "i1:256?, i2:32?)")])         # short; 16 bits
def test_columns_of_32_bits_that_begin_anywhere(name, found):
    assert schedule(name, 0).startswith(f"tile({found}")


@pytest.mark.parametrize("name, found", [
    ("cumsum_f32_108162x55", "tile(i0:8?, i1:64?)"), ("cumsum_f32_80001x90", "tile(i0:4?, i1:128?)"),
    ("cumsum_bf16_300000x55", "tile(i0:16, i1:64?)"),
    ("cumsum_f32_200000x37", "tile(i0:16, i1:32+8?)"), ("cumsum_f16_200000x47", "tile(i0:16, i1:32+16?)"),      # many lanes would be idle
    ("cumsum_bf16_60000x200", "tile(i0:4, i1:256?)"), ("cumsum_f32_50000x300", "tile(i0:2, i1:512?)"),
    ("cumsum_middle_bf16_1059x2968x16", "tile(i0:4?, i1:64?, i2:16) looped(i1) warps(1) stages(3)"),
    ("cumsum_middle_f32_1000x2000x16", "tile(i0:4, i1:64?, i2:16) looped(i1) warps(4) stages(3)")])
def test_prefixes(name, found):
    assert schedule(name, 0).startswith(found)


@pytest.mark.parametrize("name, kernel, found", [
    ("response_norm_bwd_f16_nhwc_30x64x56x56", 3, "looped(i1) split(i0 / 30) warps(4) stages(4)"),
    ("layernorm_bwd_f32_8192x2337", 0, "warps(8) stages(3)"), ("rmsnorm_bwd_f32_3000x4097", 0, "warps(8) stages(1)"),
    ("layernorm_bwd_f32_20000x1023", 0, "warps(2) stages(1)")])
def test_tiles_under_way(name, kernel, found):
    assert found in schedule(name, kernel)


@pytest.mark.parametrize("name, found", [
    ("dynamic_tanh_bwd_f32_104x65537", "tile(i0:8, i1:64?) looped(i0) split(i1 / 1025) warps(4)"),
    ("dynamic_tanh_bwd_bf16_213x20593", "tile(i0:64?, i1:64?) looped(i0) split(i1 / 322) warps(4)"),
    ("gaussian_nll_f32_1641x18066", "tile(i0:4096?) split(i0 / 264) by_thread warps(16)"),
    ("batchnorm_bwd_bf16_nchw", "tile(i2:2048+1024+64) split(i0, i2 / 8) by_thread warps(2)")])
def test_heavy_functions_of_what_is_folded(name, found):
    assert schedule(name, 0).startswith(found)


@pytest.mark.parametrize("name, kernels", [("kurtosis_f16_256x43032", 1), ("kurtosis_f16_20x430320", 4), ("var_f16_3000x20000", 1)])
def test_sums_of_moments_are_no_folds_across_programs(name, kernels):
    """Long rows are held, where a program can."""
    made = gpu_plans.planned(name)
    assert len(made) == kernels and ("by_thread" in made[0]["schedule"]) == (name != "kurtosis_f16_256x43032")


@pytest.mark.parametrize("name, found", [
    ("rmsnorm_middle_bwd_f16_41x1805x511", "tile(i1:4+4?, i2:64?) split(i1 / 8) warps(1)"),
    ("snake_bwd_f32_nchw_10161x32x14x14", "tile(i0:2?, i2:128+64+4) split(i0, i2 / 128) warps(1)")])
def test_what_is_taken_in_the_place_of_a_kernel_that_spills(name, found):
    assert gpu_plans.planned(name, build=True)[0]["quicker"].startswith(found)


@pytest.mark.parametrize("name, found", [
    ("sum_middle_f16_47598x5x128", "i0:2, i1:8?, i2:128) warps(1)"), ("sum_middle_f16_47598x4x128", "i0:4?, i1:4, i2:128) warps(1)"),
    ("sum_middle_bf16_1000x5x128", "i1:8?, i2:64)"), ("sum_middle_bf16_47598x12x128", "i1:16?, i2:64) warps(1)")])
def test_small_matrices_of_whole_lines(name, found):
    assert schedule(name, 0).startswith(f"tile({found}")


@pytest.mark.parametrize("name, found", [
    ("snake_bwd_bf16_nchw_46x2048x15x15", "i0:16?, i2:256?) looped(i0, i2) warps(8)"),
    ("snake_bwd_bf16_nchw_10x1024x15x15", "i0:16?, i2:128+128?) warps(8)"),
    ("squeeze_gate_bf16_nchw_10x1024x15x15", f"i1:4, i2:{alike(64, 4)}?) warps(4)")])
def test_angles_of_rows(name, found):
    assert schedule(name, 0).startswith(f"tile({found}")


@pytest.mark.parametrize("name, kernel, found", [
    ("masked_mean_bwd_f16_73531x7x17", 0, "tile(i0:4?, i1:8?, i2:32?) warps(2)"),
    ("masked_softmax_bwd_f16_588915x5x17", 0, "tile(i0:4?, i1:8?, i2:32?) warps(2)"),
    ("softmax_middle_bwd_bf16_4000x12x300", 0, "tile(i1:16?"),                                          # several tiles of columns
    ("rmsnorm_middle_bwd_bf16_31x2640x33", 2, "tile(i0:32?, i2:32+1) warps(1)"),                        # 31 rows of one more than a warp has
    ("softmax_bf16_2405381x33", 0, "tile(i0:32?, i1:32+1)"),
    ("evonorm_bwd_f32_nhwc_25x640x15x15", 0, "tile(i1:128+128?, i3:16+4) split(i0 / 4) warps(16)"),     # pieces of two lengths beside
    ("evonorm_bwd_bf16_nhwc_224x640x7x7", 0, "tile(i1:64?, i3:16+4) split(i0 / 16) warps(4)"),          # but no more lanes than there are rows
    ("evonorm_bwd_f32_nhwc_253x32x20x20", 0, f"tile(i1:{alike(32, 13)}?, i2:8)"),
    ("rmsnorm_add_f16_72x262145", 0, "tile(i1:1024?) split(i1 / 117) by_thread warps(2)"),              # rows that are written beside their sums
    ("rmsnorm_add_bwd_f16_1573015x48", 0, "tile(i0:16?, i1:32+32?) split(i0 / 1056) warps(4)"),
    ("rmsnorm_bwd_bf16_131073x40", 0, "tile(i0:16?, i1:32+32?) split(i0 / 1056) warps(4)"),
    ("rmsnorm_bwd_bf16_60001x40", 0, "tile(i0:8?, i1:32+32?)"),                                         # fewer rows than CARRY_TWICE
    ("bias_dropout_add_ln_bf16_1462x9814", 0, "tile(i1:8192+2048+16?) shifted(i1 % 8) warps(8)"),
    ("bias_dropout_add_ln_f32_2227x4097", 0, "tile(i1:4096+8?) shifted(i1 % 4) warps(8)")])
def test_tiles_of_little_matrices_and_of_many_sums(name, kernel, found):
    """Several matrices to a tile, pieces of enough lanes, few elements of many sums, fewer warps where random numbers are drawn beside long rows."""
    assert schedule(name, kernel).startswith(found)


@pytest.mark.parametrize("sums, found", [(4, "tile(i1:256?) split(i1 / 117) by_thread warps(2)"), (2, "tile(i1:1024?) split(i1 / 117)")])
def test_fewer_elements_of_rows_that_begin_anywhere_of_which_many_sums_are_made(sums, found):
    of = ["f32(%h[i0, i1])", "mul(f32(%h[i0, i1]), f32(%x[i0, i1]))", "mul(f32(%h[i0, i1]), f32(%y[i0, i1]))", "f32(%x[i0, i1])"][:sums]
    lines = "\n".join(f"  %s{n}: f32[72](1) for i1<262145 = sum[i1]({e})" for n, e in enumerate(of))
    graph = parse_graph(f"""graph many {{
  input %x: f16[72, 262145](262145, 1)
  input %y: f16[72, 262145](262145, 1)
  %h: f16[72, 262145](262145, 1) = f16(add(f32(%x[i0, i1]), f32(%y[i0, i1])))
{lines}
  return %h, {", ".join(f"%s{n}" for n in range(sums))}
}}""")
    (_, made), = schedule_plan(plan(graph, LARGE), LARGE).bodies.values()
    assert str(made).startswith(found)


@pytest.mark.parametrize("name, kernels", [
    ("ada_layernorm_bwd_bf16_879x8x5596", ["i2:4096+2048?) split(i1 / 1) warps(16)"]),                  # rows that begin anywhere, as they lie
    ("ada_layernorm_bwd_f16_500x16x4100", ["i2:4096+4) split(i1 / 1) warps(8)"]),
    ("ada_layernorm_bwd_f16_2000x20x1500", ["i2:1024+512?) split(i1 / 1) warps(4)"]),                   # a matrix of more than CROSSED_HELD
    ("ada_layernorm_bwd_bf16_300x40x768", ["i2:512+256) split(i1 / 4) warps(1)", "i0:4, i1:64) warps(1)"]),
    ("ada_layernorm_bwd_f32_1774x132x208", [f"i1:8?, i2:{alike(32, 7)}?) split(i1 / 1) warps(4)"]),     # several rows at once
    ("ada_layernorm_bwd_f16_1283x1025x31", ["i1:4?, i2:8+8+8+8?) split(i1 / 1) warps(1)"]),
    ("ada_layernorm_bwd_f16_5000x30x64", ["i1:32?, i2:64) warps(2)"]),                                  # of fewer,
    ("ada_layernorm_bwd_bf16_300x70x40", [f"i1:{alike(8, 9)}?, i2:16+16+16?) staged(i1)"])])              # and few in all
def test_matrices_that_are_folded_along_both_axes(name, kernels):
    """Programs carry the sums of columns over rows; those that have all rows leave nothing to be combined, nor f32 of what is rounded in the end."""
    made = [k["schedule"] for k in gpu_plans.planned(name)]
    assert len(made) == len(kernels) and all(s.startswith(f"tile({found}") for s, found in zip(made, kernels))


@pytest.mark.parametrize("name, found", [
    ("ada_layernorm_f16_5035x6x1023", "i2:512+512?) warps(1)"), ("ada_layernorm_f16_20000x2x321", "i1:2, i2:"),
    ("ada_layernorm_bf16_1000x12x1151", "i2:1024+128?) warps(1)"), ("ada_layernorm_f32_1000x3x4095", "i2:2048+2048?) warps(2)"),
    ("ada_layernorm_f16_500x6x20001", "i2:4096+4096+4096+4096+4096?) staged(i2) warps(16)"),
    ("ada_layernorm_f16_2000x20x1023", "i2:1024+16?) shifted(i2 % 8) split(i1 / 8)")])                  # rows that begin alike share theirs
def test_rows_with_something_of_their_matrix_are_read_as_they_lie_where_few_begin_alike(name, found):
    assert schedule(name, 0).startswith(f"tile({found}")


@pytest.mark.parametrize("name, kernels, first", [
    ("modulate_bwd_bf16_1515x408x33", 1, "tile(i1:16+16?, i2:64?) split(i1 / 1)"), ("modulate_bwd_f16_250x400x257", 1, "tile(i1:16+16?, i2:64?)"),
    ("layer_scale_bwd_f16_100000x65", 3, "tile(i0:32+32?, i1:64?) split(i0 / 198)")])                   # of one matrix
def test_columns_of_several_matrices_are_summed_beside_what_is_made_of_each_element(name, kernels, first):
    made = [k["schedule"] for k in gpu_plans.planned(name)]
    assert len(made) == kernels and made[0].startswith(first)


@pytest.mark.parametrize("name, found", [
    ("frn_bwd_bf16_nhwc_26x1280x40x40", "i0:2, i1:32, i2:64) looped(i1) split(i0 / 13) warps(4)"),
    ("frn_bwd_bf16_nhwc_64x1280x14x14", "i0:2, i1:32?, i2:64) looped(i1) split(i0 / 32) warps(4)"),
    ("frn_bwd_bf16_nhwc_64x1280x11x11", f"i1:{alike(8, 16)}?, i2:64) split(i0 / 26)"),                  # short columns
    ("evonorm_bwd_f16_nhwc_432x32x28x28", "i0:4, i1:32?, i2:32) looped(i1) split(i0 / 108) warps(4)")])
def test_long_columns_beside_many_sums_are_run_through(name, found):
    assert schedule(name, 0).startswith(f"tile({found}")


@pytest.mark.parametrize("name, kernel, found", [
    ("masked_softmax_bwd_bf16_674x79x65", 0, "i1:16+16+16+16+16?, i2:32?)"), ("masked_softmax_bwd_f16_1000x90x70", 0, "i1:32+32+32?, i2:32?)"),
    ("masked_softmax_bwd_f16_1000x90x100", 0, "i1:32+32+32?, i2:64?)"), ("softmax_middle_f32_2000x50x70", 0, f"i1:{alike(8, 7)}?, i2:64?)"),
    ("scale_norm_bf16_800000x29", 0, "i0:64, i1:16+16?) warps(4)"), ("scale_norm_f32_800000x31", 0, "i0:16, i1:16+16?) warps(4)"),
    ("rmsnorm_bf16_600000x31", 0, "i0:64, i1:32?) warps(4)"),                                           # with a weight
    ("rmsnorm_middle_bwd_f16_41x1805x511", 1, "i0:2?, i2:512?) looped(i0, i2) warps(4)"),
    ("rmsnorm_middle_bwd_f32_41x1205x511", 1, "i2:512?) looped(i0, i2) warps(4)")])
def test_idle_columns_short_rows_and_lines_that_are_written(name, kernel, found):
    """Held columns few of whose lanes are idle, two pieces of rows shorter than a warp is wide, small chunks of lines that begin anywhere."""
    assert schedule(name, kernel).startswith(f"tile({found}")


@pytest.mark.parametrize("name, shared", [
    ("rmsnorm_add_bwd_bf16_498x20116", True), ("rmsnorm_bwd_f16_2000x18001", True), ("rmsnorm_bwd_bf16_4095x16385", True),
    ("rmsnorm_bwd_bf16_1000x12801", False),                                                             # one program holds those without spilling
    ("rmsnorm_add_bwd_bf16_498x20112", False)])                                                         # and those at words
def test_two_programs_share_long_rows_that_begin_anywhere(name, shared):
    assert ("staged(i1 / 2)" in schedule(name, 0)) == shared
