"""Other schedules for kernels that take long by their machine code."""
from __future__ import annotations

import math
import zlib
from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks import gpu_plans
from tokamak import backend
from tokamak.codegen import quicker, relief, ways as steps
from tokamak.codegen.stages import lower_plan, render_plan, schedule_plan
from tokamak.errors import BuildError
from tokamak.fuse.cost import estimates
from tokamak.fuse.inline import inline
from tokamak.fuse.plan import plan
from tokamak.ir.parse import parse_graph
from tokamak.options import Options
from tokamak.runtime import gpu_build
from tokamak.runtime.gpu_code import Waits
from tokamak.schedule.neighbours import changed, MOST_WARPS
from tokamak.schedule.schedule import strides_of
from tokamak.schedule.tile_access import loops_read_in
from tokamak.tools import show

NAME = "gated_rmsnorm_bwd_bf16_262144x51"
ONE_POSITION = "tile(i1:1)", "tile(i0:128)", "warps(8)", "programs(6)"         # a program of the gradient of a turned norm, and many samples of it
NO_LISTING = zlib.compress(b"")


@pytest.fixture(scope="module")
def record():
    return gpu_plans.graphs(NAME)[-1]


def alike(cycles, issued, bytes=64) -> Waits:
    """Each turn of its loops takes as long as all of it once."""
    return Waits(cycles, 5, bytes, issued, again=Waits(cycles, 5, 0, issued))


def standing(record, waits=alike(9000, 1500), **others):
    """(lowered, its text, made-up binaries: all of them wait so)"""
    lowered = record.values["lower"]
    text = render_plan(lowered)
    units = [p.unit for b in text.values() for p in b.parts]
    return lowered, text, {u.name: made_up(u, waits, **others) for u in units}


def made_up(unit, waits, **others):
    facts = {"shared": 0, "registers": 64, "spilled": 0, **others}
    return gpu_build.Binary(unit, ("cuda", 90, 32), b"", "k", threads=32 * unit.warps, scratch=(0, 1), hidden=2, maps=(), packed=NO_LISTING,
                            waits=waits, **facts)


def test_a_kernel_is_wanted_where_it_takes_longer_than_its_bytes(record):
    machine = record.values["target"]
    lowered, text, slow = standing(record)
    assert set(quicker.wanting(lowered, text, slow, machine)) <= set(lowered.bodies) and quicker.wanting(lowered, text, slow, machine)
    lowered, text, fast = standing(record, Waits(300, 1, 64, 50))
    assert not quicker.wanting(lowered, text, fast, machine)
    lowered, text, spilling = standing(record, Waits(300, 1, 64, 50), spilled=relief.SPILLED)
    assert quicker.wanting(lowered, text, spilling, machine)
    lowered, text, unknown = standing(record, Waits(0, 0, 0))
    assert not quicker.wanting(lowered, text, unknown, machine)
    lowered, text, unknown = standing(record, Waits(0, 0, 0), spilled=relief.SPILLED)
    assert quicker.wanting(lowered, text, unknown, machine)             # the one that spills least is taken


def test_where_no_estimate_is_better_what_spills_least_is_taken(record):
    machine = record.values["target"]
    lowered, text, spilling = standing(record, Waits(0, 0, 0), spilled=400)
    wanted = quicker.wanting(lowered, text, spilling, machine)
    build = lambda units: {u.name: made_up(u, Waits(0, 0, 0), spilled=8 if u.warps == 8 else 400) for u in units}
    made = quicker.quicker(lowered, wanted, machine, build, {})
    changed = [g for g in wanted if made.bodies[g][1] != lowered.bodies[g][1]]
    assert changed and all(made.bodies[g][1].warps == 8 for g in changed)


def eights(units):
    """What has eight warps waits less; what has others longer, the fewer there are."""
    return {u.name: made_up(u, alike(900 if u.warps == 8 else 36000 // u.warps, 200)) for u in units}


def test_the_backend_plans_the_program_once_more_with_it(record, monkeypatch, tmp_path):
    """What a second process finds in the cache folder, it builds once."""
    lowered, text, slow = standing(record)
    machine, kernels = replace(record.values["target"], name="cuda:0"), {name: SimpleNamespace(binary=b) for name, b in slow.items()}
    asked = []

    def build(units, arch, **others):
        asked.append(units)
        return eights(units)
    monkeypatch.setattr(gpu_build, "build", build)
    monkeypatch.setattr(backend, "_gpu_kernels", lambda built, *_: dict.fromkeys(p.unit.name for b in built.values() for p in b.parts))
    finish = lambda made, trace: (render_plan(made), (), "another program")
    found = []
    for _ in range(2):
        monkeypatch.setattr(backend, "_TAKEN", {})
        made, program, others = backend._relieved(lowered, text, "program", kernels, finish, machine, Options(cache_dir=str(tmp_path)), lambda *x: x)
        assert program == "another program" and made.bodies != lowered.bodies and set(others) != set(kernels)
        found.append((made.bodies, len(asked)))
    assert found[0] == found[1] and asked
    for other, options in ((machine, Options(cache_dir="", tuned=False)), (replace(machine, ordered=True), Options(cache_dir=""))):
        assert backend._relieved(lowered, text, "program", kernels, finish, other, options, lambda *x: x) == (lowered, "program", kernels)


def test_the_log_names_the_heuristics_schedule_too(record):
    lowered, made, *_ = searched(record, eights)
    seen = replace(record, values={k: v for k, v in record.values.items() if k != "program"}, worked_out={})
    assert "quicker" not in show.schedule_text(seen)
    seen.add("heuristic", lowered)
    seen.add("lower", made)
    g = next(g for g in made.bodies if made.bodies[g][1] != lowered.bodies[g][1])
    text = show.schedule_text(seen)
    assert f"quicker by its machine code than {lowered.bodies[g][1]}" in text and f"{made.bodies[g][1]}  over" in text


def test_what_was_found_is_kept(record, tmp_path):
    """Another process builds none of it again; what cannot be read is looked for anew."""
    machine, asked = record.values["target"], []
    lowered, text, slow = standing(record)
    wanted = quicker.wanting(lowered, text, slow, machine)

    def build(units):
        asked.append(units)
        return eights(units)
    run = lambda: quicker.quicker(lowered, wanted, machine, build, {}, str(tmp_path)).bodies
    first, count = run(), len(asked)
    assert first != lowered.bodies and count and run() == first and len(asked) == count
    for file in tmp_path.glob("quicker-*"):
        file.unlink()
    assert run() == first and len(asked) == 2 * count


def test_what_was_timed_stays(record):
    machine = record.values["target"]
    lowered, text, slow = standing(record)
    timed = {g: (b, replace(s, measured=True)) for g, (b, s) in lowered.bodies.items()}
    assert quicker.wanting(lowered, text, slow, machine) and not quicker.wanting(replace(lowered, bodies=timed), text, slow, machine)


def searched(record, build):
    machine = record.values["target"]
    lowered, text, slow = standing(record)
    wanted, taken = quicker.wanting(lowered, text, slow, machine), {}
    return lowered, quicker.quicker(lowered, wanted, machine, build, taken), wanted, taken, machine


def test_the_quickest_is_taken_and_found_again_without_building(record):
    """Whatever has eight warps is said to wait less."""
    asked = []

    def build(units):
        asked.append(units)
        return eights(units)
    lowered, made, wanted, taken, machine = searched(record, build)
    changed = [g for g in wanted if made.bodies[g][1] != lowered.bodies[g][1]]
    assert changed and all(made.bodies[g][1].warps == 8 and lowered.bodies[g][1].warps != 8 for g in changed)
    assert all(len(units) <= quicker.MOST for units in asked) and len(asked) <= len(quicker.TRIED)
    again = quicker.quicker(lowered, wanted, machine, lambda units: pytest.fail("it is known"), taken)
    assert {g: s for g, (_, s) in again.bodies.items()} == {g: s for g, (_, s) in made.bodies.items()}


@pytest.mark.parametrize("waits", [Waits(90000, 5, 64, 1500), Waits(0, 0, 0)])
def test_a_single_element_has_no_other_schedule(waits):
    """The gradient of mvlgamma of one element spills in the functions that it calls."""
    machine = gpu_plans.H200
    graph = inline(parse_graph("graph one {\n input %x: f16[1](1)\n %out: f16[1](1) = f16(digamma(f32(%x[0])))\n return %out\n}"), machine)
    lowered = lower_plan(schedule_plan(plan(graph, machine), machine), machine)
    text = render_plan(lowered)
    (g, b), = text.items()
    assert lowered.bodies[g][1].dims == ()
    binaries = {p.unit.name: made_up(p.unit, waits, spilled=2 * relief.SPILLED) for p in b.parts}
    assert not quicker.wanting(lowered, text, binaries, machine)
    assert not relief.spilling(lowered, {name: b.spilled for name, b in binaries.items()})


def test_what_gains_little_is_unknown_or_does_not_compile_is_not_taken(record, monkeypatch):
    unknown = lambda units: {u.name: made_up(u, Waits(0, 0, 0)) for u in units}
    lowered, made, wanted, taken, _ = searched(record, unknown)
    assert made.bodies == lowered.bodies and set(taken.values()) == {()}
    half = lambda units: {u.name: made_up(u, alike(4500, 750)) for u in units}
    assert searched(record, half)[1].bodies != lowered.bodies
    monkeypatch.setattr(quicker, "GAIN", 1000)
    assert searched(record, half)[1].bodies == lowered.bodies

    def none(units):
        raise BuildError("no")
    lowered, made, *_ = searched(record, none)
    assert made.bodies == lowered.bodies


def test_one_that_fails_does_not_take_the_others_with_it():
    def build(units):
        if 3 in units:
            raise BuildError("three")
        return {u: "made" for u in units}
    assert quicker._built([1, 2, 3, 4, 5], build) == dict.fromkeys((1, 2, 4, 5), "made")


def test_more_shared_memory_than_the_first_had_is_not_taken(record):
    much = lambda units: {u.name: made_up(u, alike(900, 200), shared=relief.SHARED + 1) for u in units}
    lowered, made, *_ = searched(record, much)
    assert made.bodies == lowered.bodies


def test_where_the_first_one_spills_much_little_is_asked_of_what_does_not(record):
    """A tenth less is enough for what spills half as much; for what spills more than that as little is as for others."""
    machine = record.values["target"]
    lowered, text, slow = standing(record, spilled=2 * relief.SPILLED)
    (g, made), = quicker.wanting(lowered, text, slow, machine).items()
    first = quicker.Candidate((), lowered.bodies[g][1], lowered.kernels[g], made.unit)
    for spilled, taken in ((relief.SPILLED, True), (relief.SPILLED + 8, False)):
        search = quicker._Search(lowered.bodies[g][0], first, estimates(lowered.plan.graph, machine), machine, made)
        search.look(16)
        c = search.ways[0]
        found = made_up(c.unit, alike(9000, 1500), spilled=spilled)
        search.takes = (quicker.GAIN + quicker.FURTHER) / 2 * quicker.cycles(search.b, c.kernel, found, search.hints, machine)
        search.take({c.unit.name: found})
        assert (search.best is c) == taken


def test_more_programs_of_fewer_threads_and_the_other_way_about():
    b, s, hints, machine = first_of("standardize_columns_bwd_bf16_5538x1025", lambda s: s.split and s.staged is None)
    found = list(steps.as_many_threads(s))
    assert found == [(f"programs({s.programs // 2})", f"warps({2 * s.warps})"), (f"programs({2 * s.programs})", f"warps({s.warps // 2})")]
    made = [relief.remade(b, s, way, hints, machine)[0] for way in found]
    assert [m.programs * m.warps for m in made] == [s.programs * s.warps] * 2 and len({m.programs for m in made} | {s.programs}) == 3


def test_blocks_of_rows_that_begin_anywhere_are_shorter():
    """Each with its own piece for what stands around whole words, by fewer threads, and the rows by more programs."""
    b, s, hints, machine = first_of("bias_gelu_bwd_f32_57x80654", lambda s: s.shift is not None)
    block, end = s.sizes(s.shift.axis)
    made = [relief.remade(b, s, way, hints, machine)[0] for way in steps.in_blocks(s)]
    assert [(m.sizes(s.shift.axis), m.warps, m.programs // s.programs) for m in made] == \
        [((block // n, end), s.warps // n, more) for n in (4, 2) for more in (1, 2)]


def test_more_stack_than_the_first_had_is_not_taken(record):
    """However quick it seems to be; as much is."""
    def build(more):
        return lambda units: {u.name: made_up(u, alike(300 if u.warps == 8 else 9000, 200), spilled=8 + more * (u.warps == 8)) for u in units}
    machine = record.values["target"]
    lowered, text, slow = standing(record, spilled=8)
    wanted = quicker.wanting(lowered, text, slow, machine)
    warps = lambda made: {made.bodies[g][1].warps for g in wanted}
    assert 8 not in warps(lowered) and 8 not in warps(quicker.quicker(lowered, wanted, machine, build(8), {}))
    assert 8 in warps(quicker.quicker(lowered, wanted, machine, build(0), {}))


@pytest.mark.parametrize("kept", [0, 3])
def test_one_that_keeps_what_it_read_needs_more_to_be_left(record, kept):
    """A tenth less is enough for others: of what the cache keeps the estimate knows less."""
    machine, waits = record.values["target"], alike(9000, 1500)
    lowered, text, slow = standing(record, waits=waits)
    (g, made), = quicker.wanting(lowered, text, slow, machine).items()
    s, keeping = lowered.bodies[g][1], replace(lowered.bodies[g][1], kept=kept)
    first = quicker.Candidate((), keeping, tuple(replace(k, schedule=keeping) if k.schedule == s else k for k in lowered.kernels[g]), made.unit)
    search = quicker._Search(lowered.bodies[g][0], first, estimates(lowered.plan.graph, machine), machine, made)
    search.look(10)
    search.ways = [c for c in search.ways if c.changes == ("warps(2)",)]
    found, (c,) = {c.unit.name: made_up(c.unit, waits) for c in search.ways}, search.ways
    search.takes = (quicker.GAIN + quicker.KEPT) / 2 * quicker.cycles(search.b, c.kernel, found[c.unit.name], search.hints, machine)
    search.take(found)
    assert (search.best is c) == (kept == 0)


@pytest.mark.parametrize("name, least", [
    ("rmsnorm_middle_f32_20x256x4001", quicker.SHARING), ("rmsnorm_middle_bf16_100x255x500", quicker.SHARING),
    ("rmsnorm_middle_f32_20x256x4000", quicker.GAIN),                                       # lines of whole sectors
    ("sum_middle_f16_4783x300x25", quicker.GAIN), ("softmax_f32_65536x257", quicker.GAIN)])  # nothing beside each other is written; rows
def test_columns_of_lines_within_sectors_need_more(name, least):
    record = gpu_plans.graphs(name)[0]
    lowered, hints = record.values["lower"], estimates(record.values["lower"].plan.graph, record.values["target"])
    assert {quicker.gain_of(*body, hints) for body in lowered.bodies.values()} == {least}


def test_loops_of_one_tile_are_tried_with_more_under_way():
    """Columns of 136 rows that a warp walks down, a tile at a time. What holds its rows has no loop."""
    b, s, hints, machine = first_of("sum_outer_bf16_136x34258", lambda s: bool(s.looped))
    assert s.stages == 1 and f"stages({steps.UNDER_WAY})" in set(steps.near(b, s, 528, False))
    first, *_ = gpu_plans.planned("sum_outer_bf16_136x34258", build=True)
    assert first["quicker"].endswith(f"stages({steps.UNDER_WAY})")
    b, s, hints, machine = first_of("softmax_f32_65536x257", lambda s: not s.looped)
    assert not any("stages" in change for change in steps.near(b, s, 528, False))


def test_what_the_cache_has_lost_is_read_again():
    """Three loops over a row read both of its values: all of that again twice, where the rows under way are more than the cache keeps."""
    record = gpu_plans.graphs("distillation_f32_7804x2448")[0]
    lowered, machine = record.values["lower"], record.values["target"]
    hints, (b, s) = estimates(lowered.plan.graph, machine), next(iter(lowered.bodies.values()))
    loops = changed(b, s, ("looped(i1:1024)",), hints)
    assert s.once and not loops.once and [n for _, n in loops_read_in(b, loops.looped)] == [3, 3] and not loops_read_in(b, s.looped)
    kernels = next(iter(lowered.kernels.values()))
    made = made_up(relief.main(kernels, s), alike(9000, 1500))
    read = 2 * 7804 * 2448 * 4
    again = lambda s, programs, machine: quicker.again(b, s, programs, made, hints, machine)
    assert again(loops, 7804, machine) == 2 * read and again(loops, 300, machine) == again(s, 7804, machine) == 0
    assert again(loops, 7804, replace(machine, l2=1 << 30)) == 0


def test_what_must_spill_much_is_not_built(monkeypatch):
    """A row that 16 warps hold with 128 registers a thread and 96 bytes of stack: by four it fits nearly, by two never; without any stack
    eight are the fewest."""
    b, s, hints, machine = staged("cosine_bwd_bf16_1302x32767")
    found = relief.remade(b, s, (f"warps({s.warps})", "registers(0)"), hints, machine)
    first = quicker.Candidate((), *found, relief.main(found[1], found[0]))
    facts = {"registers": 128, "spilled": 96}
    search = quicker._Search(b, first, hints, machine, made_up(first.unit, alike(9000, 1500), **facts))
    assert all(search._spills(changed(b, first.schedule, (f"warps({n})",), hints)) == (n < 4) for n in (1, 2, 4, 8))
    search.look(16)
    assert ("warps(8)",) in {c.changes for c in search.ways}
    full = quicker._Search(b, first, hints, machine, made_up(first.unit, alike(9000, 1500), registers=128))
    assert all(full._spills(changed(b, first.schedule, (f"warps({n})",), hints)) == (n < 8) for n in (1, 2, 4, 8))
    monkeypatch.setattr(quicker, "LIKELY", (1.0, 1.0))
    search.seen.clear()
    search.look(16)
    assert search.ways and ("warps(8)",) not in {c.changes for c in search.ways}


def test_what_strides_all_ways_takes_as_long_as_it_has_lines():
    """Heads are innermost of the biases: each element of a tile of 64 x 64 is in a line of its own, and four warps for eight save none of them."""
    record = gpu_plans.graphs("position_softmax_bf16_1935x6x64")[0]
    machine, lowered = record.values["target"], record.values["lower"]
    hints, built = estimates(lowered.plan.graph, machine), render_plan(lowered)
    (g, (part,)), = ((g, b.parts) for g, b in built.items())
    b, s = lowered.bodies[g]
    ways = [relief.remade(b, s, way, hints, machine) for way in (("warps(4)",), next(steps.traded(b, s, steps.TRADED[0])))]
    kernels = [part.kernel, *(next(k for k in ks if k.schedule == made) for made, ks in ways)]
    units = [part.unit, *(relief.main(ks, made) for made, ks in ways)]
    made = gpu_build.build(units, machine.arch)
    lines = lambda k, u: quicker.estimated(b, k, made[u.name], hints, machine)[4][0] * k.programs * k.schedule.warps
    plain, fewer, shared = map(lines, kernels, units)
    assert plain > 40_000_000 and fewer > 0.9 * plain and shared < plain / 4


def test_what_is_read_once_for_more_of_another_axis():
    """Positions' biases are the same for every sample of a batch, and lie with the heads innermost; of values that have all axes nothing is."""
    b, s, hints, machine = first_of("position_softmax_bf16_1935x6x64", lambda s: True)
    samples, heads, *_ = s.order
    assert any(samples not in address.axes() and address.coefficient(heads) == 1 for _, address, _ in strides_of(b))
    found = []
    for n, way in ((n, way) for n in steps.TRADED for way in steps.traded(b, s, n)):
        made, _ = relief.remade(b, s, way, hints, machine)
        more, = set(made.dims) - set(s.dims)
        assert math.prod(made.sizes(a)[0] for a in made.dims if a in b.parallel) == math.prod(s.sizes(a)[0] for a in s.dims if a in b.parallel)
        assert made.sizes(more) == (n,)
        found.append((more, n))
    assert found == [(a, n) for n in steps.TRADED for a in (samples, heads)]
    b, s, *_ = first_of("softmax_bf16_4096x1000", lambda s: True)
    assert not list(steps.traded(b, s, min(steps.TRADED)))


def test_whole_sectors_for_less_of_another_axis():
    """The gradient of a norm whose channels lie outermost in what comes in, at one position a program: every element it reads of that is in a sector
    of its own. Eight positions are 16 bytes of it; as many programs more share the samples as there are fewer for the positions."""
    b, s, hints, machine = first_of("norm_turned_bwd_bf16_15546x40x24", lambda s: s.split)
    s = changed(b, s, ONE_POSITION, hints)
    line = s.order[1]
    assert line not in s.dims and any(address.coefficient(line) == 1 for _, address, _ in strides_of(b))
    for n in steps.TRADED:
        changes, = steps.traded(b, s, n)
        made = changed(b, s, changes, hints)
        assert made.sizes(line) == (n,) and made.programs == n * s.programs and made.warps == s.warps
        assert made.sizes(s.order[0])[0] * n == s.sizes(s.order[0])[0]


@pytest.mark.parametrize("case, axis", [
    ("norm_turned_bwd_bf16_15546x40x24", 0),            # samples, which programs share: as many more of these
    ("heads_apart_bwd_f32_5x1024x20x72", 3),            # tokens, before what lies contiguously
])
def test_programs_of_one_warp_are_as_many_threads(case, axis):
    b, s, hints, machine = first_of(case, lambda s: s.split)
    s = changed(b, s, ONE_POSITION, hints) if axis == 0 else s
    ways = list(steps.of_one_warp(b, s, False))
    assert list(steps.of_one_warp(b, s, True)) == ways[:1] and len(ways) == 2
    for changes, grown in zip(ways, (1, steps.GROWN)):
        made, _ = relief.remade(b, s, changes, hints, machine)
        assert made.warps == 1 and made.programs == s.programs * s.warps
        assert made.sizes(s.order[axis])[0] * s.warps == s.sizes(s.order[axis])[0] * grown
        assert all(made.sizes(a) == s.sizes(a) for a in s.dims if a is not s.order[axis])
    alone, _ = relief.remade(b, s, ("warps(1)",), hints, machine)
    assert not list(steps.of_one_warp(b, alone, False))


def test_no_more_programs_than_run_at_once():
    """Where a few would begin as the others end, and only there: 1056 of eight to a tile of columns, of which 1000 run beside each other."""
    b, s, hints, machine = first_of("heads_apart_bwd_bf16_5x1024x20x72", lambda s: s.split)
    ways = lambda programs, at_once: list(steps.at_once_alone(b, replace(s, programs=8), programs, at_once))
    assert ways(1056, 1000) == [("programs(7)",)] == ways(1056, 924)
    assert ways(1056, 1056) == ways(1056, 4000) == ways(1056, 500) == ways(1056, 0) == []
    changes, = ways(960, 924)
    assert relief.remade(b, s, changes, hints, machine)[0].programs == 7


def test_many_small_programs_share_an_axis():
    """121600 of 98 elements each (H200, with a kernel of 12 us: 87 us and 42)."""
    b, s, hints, machine = first_of("pixels_shuffled_bwd_f16_95x640x7x7", lambda s: not s.split and len(s.dims) == 3)
    ways = lambda programs: list(steps.at_once_alone(b, s, programs, 4224))
    assert ways(121600) == [("shared(i0 / 4224)",)] and ways(4224) == ways(4224 * steps.MANY) == []
    made, _ = relief.remade(b, s, *ways(121600), hints, machine)
    assert made.split == s.order[:1] and made.programs == 4224 and made.dims == s.dims


def first_search(case: str, such):
    """The search from the first kernel of a case whose schedule is such a one, and what is built of it."""
    record = gpu_plans.graphs(case)[-1]
    lowered, machine = record.values["lower"], record.values["target"]
    g, (b, s) = next((g, made) for g, made in lowered.bodies.items() if such(made[1]))
    first = quicker.Candidate((), s, lowered.kernels[g], relief.main(lowered.kernels[g], s))
    made = gpu_build.build([first.unit], machine.arch)
    return quicker._Search(b, first, estimates(lowered.plan.graph, machine), machine, made[first.unit.name]), made


def test_what_folds_partial_results_is_in_what_a_schedule_takes():
    """BatchNorm's statistics, 264 programs: 7.5 us and 2.0 (H200), 2112 of one warp 5.8 and 5.8."""
    search, made = first_search("batchnorm_bf16_nhwc_675x32x15x15", lambda s: s.split)
    b, hints, machine = search.b, search.hints, search.target
    changes = next(steps.of_one_warp(b, search.first.schedule, False))
    found = relief.remade(b, search.first.schedule, changes, hints, machine)
    more = quicker.Candidate(changes, *found, relief.main(found[1], found[0]))
    made = made | gpu_build.build([more.unit, *(p.unit for c in (search.first, more) for p in c.folds)], machine.arch)
    alone = lambda c: quicker.cycles(b, c.kernel, made[c.unit.name], hints, machine)
    folded = lambda c: search._folded(c, made)
    assert more.schedule.programs == 8 * search.first.schedule.programs and len(more.folds) == len(search.first.folds) == 1
    assert alone(more) < alone(search.first) == search.takes and folded(more) > folded(search.first) > 0
    search.ways, search.gain = [more], 1.0
    assert {u.name for u in search.units()} == {more.unit.name, more.folds[0].unit.name, search.first.folds[0].unit.name}
    search.take(made)
    assert search.takes == min(alone(search.first), alone(more) + folded(more) - folded(search.first))
    assert {u.name for u in search.units()} == {more.unit.name, more.folds[0].unit.name}


@pytest.mark.parametrize("width, least", [(65, 32), (64, 16)])
def test_rows_that_begin_anywhere_are_written_in_longer_pieces(width, least):
    """A gradient that is written turned, f16: of 514 x 1345 x 65 pieces of 16, over two sectors each, 124 us, of 32 87 (H200)."""
    search, _ = first_search(f"columns_scored_bwd_f16_514x1345x{width}", lambda s: len(s.dims) == 2)
    line = search.first.schedule.dims[0]
    strews = {n: search._strews(changed(search.b, search.first.schedule, (f"tile(i{search.first.schedule.order.index(line)}:{n})",), search.hints))
              for n in (8, 16, 32)}
    assert strews == {n: n < least for n in (8, 16, 32)} and search.first.schedule.sizes(line)[0] >= 32


def test_a_loop_of_several_turns():
    """LLVM makes four of a short loop's at once; what is read in two loops is read twice."""
    for case, found in (("sum_inner_f32_1024x65536", 4), ("softmax_bwd_f32_72x131073", 1), (NAME, 1)):
        lowered, machine = (record := gpu_plans.graphs(case)[-1]).values["lower"], record.values["target"]
        g, built = next(iter(render_plan(lowered).items()))
        b, s = lowered.bodies[g]
        part, = (p for p in built.parts if p.kernel.schedule == s)
        made, hints = gpu_build.build([part.unit], machine.arch)[part.unit.name], estimates(lowered.plan.graph, machine)
        assert quicker.unrolled(b, s, made) == found
        through = quicker.estimated(b, part.kernel, made, hints, machine)[2]
        assert through * found == pytest.approx(quicker.turns(b, s, part.kernel.programs, hints))


def test_bytes_and_turns():
    """Read twice is read once; a program of 16 rows of 51 takes 262144 / (16 x programs) of them."""
    record = gpu_plans.graphs(NAME)[-1]
    lowered, machine = record.values["lower"], record.values["target"]
    hints = estimates(lowered.plan.graph, machine)
    g = next(g for g, ks in lowered.kernels.items() if any(k.schedule.split for k in ks))
    b, s = lowered.bodies[g]
    k = next(k for k in lowered.kernels[g] if k.schedule == s)
    rows = next(a for a in s.order if a in s.split)
    tiles = -(-262144 // sum(s.sizes(rows)))
    assert quicker.turns(b, s, k.programs, hints) == pytest.approx(tiles / k.programs) and k.programs == s.programs
    row = 262144 * 51 * 2
    assert 4 * row <= quicker.moved(b, hints) <= 6 * row


@pytest.mark.parametrize("tight", [False, True])
def test_ways_that_need_more_registers_are_left_where_there_are_none(record, tight):
    lowered = record.values["lower"]
    b, s = next(x for x in lowered.bodies.values() if x[1].split)
    found = list(steps.near(b, s, 528, tight))
    assert len(found) == len(set(found)) and any(x.startswith("tile(") for x in found)
    fewer = [x for x in found if x.startswith("warps(") and int(x[6:-1]) < s.warps]
    larger = [x for x in found if x.startswith("tile(i0:") and int(x[8:-1]) > s.sizes(s.order[0])[0]]
    assert bool(fewer) != tight and bool(larger) != tight


def test_a_gradient_that_waits_in_each_turn_has_more_programs():
    """In a process of its own compiler: five waits of each turn in tiles of 16 rows by four warps."""
    first, *_ = gpu_plans.planned("gated_rmsnorm_bwd_bf16_1547612x51", build=True)
    assert "i0:16?, i1:32+32?) split(i0 / 1056) warps(4)" in first["schedule"]
    assert "i0:4, i1:32+32?) split(i0 / 4224) warps(1)" in first["quicker"]


def test_a_short_row_is_tried_in_quarters():
    """54 elements of 64 lanes (H200: 79 us, 55)."""
    first, = gpu_plans.planned("weightnorm_bwd_bf16_613884x54", build=True)
    assert "i1:64?" in first["schedule"] and "i1:16+16+16+16?" in first["quicker"]


# -- rows held in stages -------------------------------------------------------------------------------------------------------
STAGED = ["softmax_bf16_2621x25600", "cosine_bwd_bf16_687x32767", "layernorm_bwd_bf16_4095x16385", "rmsnorm_f16_244x25882",
          "log_softmax_f32_255x99688"]


def staged(name: str):
    """(body, schedule, hints, target) of the first kernel of a case that holds rows in stages."""
    return first_of(name, lambda s: getattr(s, "staged", None) is not None)


def first_of(name: str, such):
    """(body, schedule, hints, target) of the first kernel of a case whose schedule is such a one."""
    record = gpu_plans.graphs(name)[-1]
    lowered, machine = record.values["lower"], record.values["target"]
    b, s = next((b, s) for b, s in lowered.bodies.values() if such(s))
    return b, s, estimates(lowered.plan.graph, machine), machine


@pytest.mark.parametrize("name", STAGED)
def test_shares_of_rows_cover_them(name):
    """By however many programs, in pieces of any length: all elements, few idle lanes; the words that rows begin and end in are one piece more."""
    b, s, hints, _ = staged(name)
    row, n = s.order.index(s.staged), hints.exactly(s.staged.extent)
    group = s.shift.group if s.shift is not None else 1
    for count in (1, 2, 4, 8):
        for lanes in (1024, 4096):
            made = changed(b, s, (f"staged(i{row} / {count})", f"lanes(i{row}:{lanes})"), hints)
            sizes = made.sizes(made.staged)
            assert s.shift is None or sizes[-1] == 2 * group
            whole = sizes if s.shift is None else sizes[:-1]
            words = n // group * group
            assert made.sharers == count and words <= count * sum(whole) < 1.25 * words + 2048 and max(whole) <= lanes
            assert (s.staged in made.exact) == (s.shift is None and count * sum(whole) == n)
            assert (made.warps, made.split, made.programs, made.registers) == (s.warps, s.split, s.programs, s.registers)


@pytest.mark.parametrize("name", STAGED)
def test_other_ways_to_hold_rows(name):
    """Most can be lowered; by fewer threads, and by more programs with as many in all."""
    b, s, hints, machine = staged(name)
    ways = list(steps.held_in_stages(s))
    made = {way: relief.remade(b, s, way, hints, machine) for way in ways}
    assert len(set(ways)) == len(ways) and sum(m is not None for m in made.values()) > len(ways) // 2
    for way, found in made.items():
        if found is not None and way[0].startswith("staged"):
            assert found[0].warps * found[0].sharers == s.warps * s.sharers or found[0].warps in (steps.LEAST_WARPS, MOST_WARPS)
        if found is not None and way[0].startswith("looped"):
            assert found[0].staged is None and found[0].sharers == 1 and found[0].looped == {s.staged} and not found[0].registers


@pytest.mark.parametrize("words", ["staged(i1 / 3)", "staged(i1 / 16)", "staged(i0 / 2)", "lanes(i1:3000)", "lanes(i0:64)", "staged(i1)",
                                   "lanes(i1)"])
def test_words_that_share_no_row(words):
    b, s, hints, _ = staged("softmax_bf16_2621x25600")
    assert changed(b, s, (words,), hints) is None


@pytest.mark.parametrize("name", ["softmax_f16_40000x200", "groupnorm_bf16_nchw_96x768x8x8"])
def test_only_rows_along_one_axis_are_shared_anew(name):
    lowered = gpu_plans.graphs(name)[-1].values["lower"]
    b, s = next(iter(lowered.bodies.values()))
    hints = estimates(lowered.plan.graph, gpu_plans.H200)
    assert all(changed(b, s, (f"{word}(i{i}{mark}{n})",), hints) is None
               for i in range(len(s.order)) for word, mark, n in (("staged", " / ", 2), ("lanes", ":", 64)))


def test_a_row_that_spills_is_held_by_fewer_threads():
    """By a process of its own compiler: rows of 118915 by eight programs of 64 registers a thread spill (H200: 73.5 us, 57.8 by half the threads)."""
    first, *_ = gpu_plans.planned("softmax_bwd_bf16_272x118915", build=True)
    assert first["spilled"] and "staged(i1 / 8) warps(16)" in first["schedule"] and "staged(i1 / 8) warps(8)" in first["quicker"]


# -- which of the two is asked ---------------------------------------------------------------------------------------------------
def test_of_large_graphs_and_of_unknown_code_what_spills_is_relieved(record, monkeypatch):
    machine, asked = record.values["target"], []
    monkeypatch.setattr(relief, "least", lambda *_: asked.append("relief") or ())
    monkeypatch.setattr(quicker, "_sought", lambda *_: asked.append("quicker") or ())
    build = lambda units: pytest.fail("nothing is built here")

    def others(waits, spilled):
        lowered, text, binaries = standing(record, waits=waits, spilled=spilled)
        asked.clear()
        made = quicker.others(lowered, text, binaries, machine, build, {})
        assert made is lowered
        return asked
    assert others(alike(9000, 1500), 400) == ["quicker"] and others(Waits(300, 1, 64, 50), 0) == []
    assert others(Waits(0, 0, 0), 400) == ["relief"] and others(Waits(0, 0, 0), 0) == []
    monkeypatch.setattr(quicker, "SMALL", len(standing(record)[1]) - 1)
    assert others(alike(9000, 1500), 400) == ["relief"] and others(alike(9000, 1500), 0) == []


@pytest.mark.parametrize("name, gain", [
    ("position_softmax_bwd_f16_5008x1x63", quicker.SHARING), ("position_softmax_bwd_bf16_1104x8x58", quicker.SHARING),
    ("position_softmax_bwd_f16_5008x1x64", quicker.GAIN),                       # whole sectors
    ("norm_turned_bwd_f16_726x608x26", quicker.GAIN),                           # rows across which something lies
    ("response_norm_bwd_bf16_nchw_140x96x15x15", quicker.GAIN),                 # long ones
    (NAME, quicker.GAIN)])                                                      # one behind the other, a program's
def test_of_short_rows_that_lie_beside_another_programs_more_is_asked(name, gain):
    b, s, hints, _ = first_of(name, lambda s: s.split)
    assert quicker.gain_of(b, s, hints) == gain
