"""Long rows that one program holds, or several of a cluster: which, by how many rounds of programs there are, as planned for an H200."""
from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import gpu_plans
from tests.large_gpu import LARGE, SOFTMAX
from tokamak.codegen.stages import schedule_plan
from tokamak.fuse.inline import inline
from tokamak.fuse.plan import plan
from tokamak.ir.parse import parse_graph
from tokamak.schedule import tile_stages


def planned(rows: int, columns: int, kind: str = "bf16", target=LARGE):
    graph = inline(parse_graph(SOFTMAX.format(type=kind, rows=rows, columns=columns)), target)
    schedule, = (s for _, s in schedule_plan(plan(graph, target), target).bodies.values())
    return schedule


@pytest.mark.parametrize("rows, sharers", [(135, 8), (200, 8), (263, 1), (396, 1), (486, 8), (687, 8), (1302, 1), (4000, 1)])
@pytest.mark.parametrize("columns", [57344, 57979])
def test_rows_are_shared_where_the_last_round_would_idle(rows, sharers, columns):
    """Of 132 multiprocessors: in two rounds of 135 programs nearly all of the second, in two of 263 one."""
    s = planned(rows, columns)
    whole = s.sizes(s.staged) if s.shift is None else s.sizes(s.staged)[:-1]
    assert s.staged is not None and s.sharers == sharers
    assert (s.warps, s.registers) == ((4, 0) if sharers == 8 else (tile_stages.WARPS, 2 * tile_stages.REGISTERS))
    assert columns - 8 <= sharers * sum(whole) <= 1.15 * columns and max(whole) <= 8192


@pytest.mark.parametrize("kind, columns", [("f32", 17000), ("bf16", 40000)])
def test_short_shares_are_left(kind, columns):
    """Less than 12 KB to each of eight."""
    assert planned(200, columns, kind).sharers == 1


def test_shares_begin_at_words():
    """Rows that do, in eight parts that would not."""
    assert planned(135, 57352).sharers == 1 and planned(135, 57344).sharers == 8


def test_rows_that_take_half_the_threads_are_as_they_were():
    s = planned(200, 24576)
    assert (s.sharers, s.warps) == (1, tile_stages.WARPS // 2 if 24576 * 2 < tile_stages.TWO_BYTES else tile_stages.WARPS)


def test_no_cluster_where_the_gpu_has_none():
    s = planned(135, 57344, target=replace(LARGE, cluster=1))
    assert s.sharers == 1 and s.warps == tile_stages.WARPS


@pytest.mark.parametrize("name, warps", [("cosine_f32_744x34184", 4), ("cosine_bf16_500x80000", 4), ("kurtosis_f32_800x50000", 4),
                                         ("log_softmax_f32_500x40000", 16), ("softmax_bwd_f32_1500x27400", 16)])
def test_programs_that_take_rows_one_after_the_other_and_only_fold_them_have_few_warps(name, warps):
    only, = gpu_plans.planned(name)
    assert "staged(i1 / " in only["schedule"] and "split(i0 / " in only["schedule"] and f" warps({warps}) stages(3)" in only["schedule"]
