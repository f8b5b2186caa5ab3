"""Whatever steps the search by machine code and `tokamak tune` may take from a heuristic's schedule, programs compute the same."""
from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.compiled.conftest import CUDA, INTERPRETED
from tests.compiled.harness import agree
from tests.compiled.test_properties import check, EXACT, EXAMPLES, SETTINGS
from tests.graphs import programs
from tokamak.codegen import quicker, relief, tuned, ways
from tokamak.codegen.scope import Unschedulable
from tokamak.codegen.stages import lower_body
from tokamak.codegen.tiles import TileLowering
from tokamak.errors import BuildError
from tokamak.fuse.cost import estimates
from tokamak.runtime import gpu_build
from tokamak.schedule.body import Body
from tokamak.schedule.neighbours import changed, steps
from tokamak.schedule.tile_schedule import TileSchedule
from tokamak.tools.record import recording

TILES = pytest.mark.parametrize("target", [pytest.param("interpret", marks=INTERPRETED), pytest.param("cuda", marks=CUDA)])
chosen = tuned.choose


def others(b: Body, s: TileSchedule, hints, target) -> list[tuple[str, ...]]:
    """Changes of `s` of which a kernel can be made."""
    def all_ways() -> Iterator[tuple[str, ...]]:
        yield from ((change,) for change in steps(b, s, hints, target))
        if s.staged is None and s.dims and not s.flat:
            for tight in (False, True):
                yield from ways.of_one_warp(b, s, tight)
                yield from ((change,) for change in ways.near(b, s, 3, tight))
            for n in (2, 4, 8):
                yield from ways.traded(b, s, n)
            yield from ways.in_quarters(b, s)
            yield from ways.read_ahead(b, s)
            yield from ways.longer_turns(b, s)
            yield from ways.as_many_threads(s) if s.split else ()
    return [way for way in dict.fromkeys(all_ways()) if relief.remade(b, s, way, hints, target) is not None]


def taking(pick: Callable[[list[tuple[str, ...]]], tuple[str, ...]], taken: list) -> Callable:
    """In the place of `tuned.choose`: the heuristic's schedule with the changes that `pick` picks."""
    def choose(b, hints, target, table):
        s = chosen(b, hints, target, table)
        ways = others(b, s, hints, target) if type(s) is TileSchedule else []
        if not ways:
            return s
        way = pick(ways)
        made = changed(b, s, way, hints)
        if target.name != "cpu":                # a search leaves out what does not compile: a tile of too few elements for functions of four at once
            try:
                gpu_build.build([relief.main(lower_body(b, made, hints, target), made)], target.arch)
            except BuildError:
                return s
        taken.append(way)
        return made
    return choose


@TILES
@pytest.mark.parametrize("policy, dtypes", [("fast", EXACT), ("strict", EXACT), ("eager", (torch.float16, torch.bfloat16))])
def test_random_programs(monkeypatch, target, policy, dtypes):
    taken: list = []

    def one(program, seed):
        monkeypatch.setattr(tuned, "choose", taking(random.Random(seed).choice, taken))
        check(program, policy, target)
    settings(SETTINGS[target], max_examples=EXAMPLES or 80)(given(programs(dtypes=dtypes), st.integers(0, 1 << 30))(one))()
    assert len(taken) >= 5 and len({way[0].partition("(")[0] for way in taken}) >= 2


UPDATES = {
    "added": (lambda x, i, v: x.index_add(0, i, v), torch.float32),
    "added, 16 bits": (lambda x, i, v: x.index_add(0, i, v), torch.bfloat16),
    "multiplied": (lambda x, i, v: x.scatter_reduce(0, i[:, None].expand(-1, 7), v, "prod"), torch.float32),
    "the last": (lambda x, i, v: x.index_put((i,), v), torch.float32),
    "of one row": (lambda x, i, v: x[:, 0].index_add(0, i, v[:, 0]), torch.float32),
}


@TILES
@pytest.mark.parametrize("name", UPDATES)
def test_updates_in_order_stay_in_order(monkeypatch, target, name):
    """Of two in a tile that meet in one element one was lost: sums of 5000 rows into 50 lacked some 50 of them, in `strict`."""
    fn, dtype = UPDATES[name]
    at = lambda: torch.Generator().manual_seed(5)
    x, i, v = (torch.randn(3, 7, generator=at()).to(dtype), torch.randint(0, 3, (40,), generator=at()), torch.randn(40, 7, generator=at()).to(dtype))
    known: list = []
    monkeypatch.setattr(tuned, "choose", taking(lambda ways: known.append(ways) or ways[0], []))
    agree(fn, [x, i, v], policy="strict", target=target)
    for n in range(max(map(len, known))):
        monkeypatch.setattr(tuned, "choose", taking(lambda ways, n=n: ways[n % len(ways)], []))
        agree(fn, [x, i, v], policy="strict", target=target)


def test_several_updates_of_a_tile_in_order_are_refused():
    with recording() as recorder:
        run = torch.compile(UPDATES["added"][0], backend="tokamak", dynamic=False, options={"target": "interpret", "policy": "strict"})
        run(torch.zeros(3, 7), torch.tensor([0, 1, 1]), torch.ones(3, 7))
    (record,) = recorder.graphs
    lowered, target = record.values["lower"], record.values["target"]
    (b, s), = ((b, s) for b, s in lowered.bodies.values() if s.looped)
    down, = s.looped
    assert down not in s.dims and changed(b, s, (f"tile(i{s.order.index(down)}:2)",), None) is None and changed(b, s, ("stages(2)",), None) is None
    two = replace(s, dims=(down, *s.dims), pieces=((down, (2,)), *s.pieces))
    with pytest.raises(Unschedulable, match="one after the other"):
        TileLowering(b, two, estimates(lowered.plan.graph, target), target.name).kernel()


RUN_THROUGH = {
    "softmax": lambda x, w: torch.softmax(x * w, -1),
    "norm": lambda x, w: torch.nn.functional.layer_norm(x, x.shape[-1:], w),
    "prefixes": lambda x, w: torch.cumsum(x, -1) * w,
    "the greatest": lambda x, w: (x * w).max(-1),
    "in place": lambda x, w: x.mul_(w).sub_(x.mean(-1, keepdim=True)),
}


@TILES
@pytest.mark.parametrize("columns", [256, 250, 64, 7])
@pytest.mark.parametrize("name", RUN_THROUGH)
def test_rows_that_are_run_through_a_turn_ahead(monkeypatch, target, name, columns):
    """Whole turns, a last one that is not, a single one, and less than that."""
    taken: list = []
    monkeypatch.setattr(tuned, "choose", taking(lambda ways: ("looped(i1:64)", "ahead()"), taken))
    x, w = torch.randn(5, columns), torch.randn(columns)
    agree(lambda x, w: RUN_THROUGH[name](x.clone(), w), [x, w], target=target)
    assert taken
