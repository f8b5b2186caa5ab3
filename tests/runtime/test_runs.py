"""Launches as one call: what stands together, where small values lie, and what arrives at the driver."""
from __future__ import annotations

import gc
import struct
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.driving import device, fake, launch, library                # fixtures
from tests.threads import in_threads
from tokamak.runtime import gpu, gpu_launcher
from tokamak.runtime.program import assemble, source
from tokamak.runtime.pieces import names_in
from tokamak.runtime.runs import SMALL, Group, Run, Word, grouped, layout
from tokamak.runtime.steps import Alloc, Call, Copy, Drop, Launch, Let, Program, Ref, Return, TensorSpec, read

ON = "cuda:0"


def kernel(*names: str, on: str = ON) -> Launch:
    return Launch("k", tuple(("ptr", n) for n in names), grid=("1", "1", "1"), device=on)


def alloc(name: str, nbytes: int = 400, kind: str = "temp", on: str = ON, text: str = "") -> Alloc:
    return Alloc(name, TensorSpec((text or str(nbytes // 4),), ("1",), torch.float32, on), text or str(nbytes), kind)


def call(*names: str) -> Call:
    return Call(torch.ops.aten.relu.default, tuple(Ref(n) for n in names), {}, (), True)


def program(*steps, **fields) -> Program:
    return Program("p", ("x",), (*steps, Return(())), **fields)


def shape(items) -> list:
    """Groups as lists of positions, other steps by their class."""
    return [[p for p, _ in i.launches] if isinstance(i, Group) else type(i).__name__ for _, i in items]


# -- which launches are one call -----------------------------------------------------------------------------------------
def test_memory_is_taken_before_a_group_and_given_back_behind_it():
    p = program(alloc("a"), kernel("x", "a"), alloc("b"), kernel("a", "b"), Drop("a"), alloc("c"), kernel("b", "c"), Drop("b"))
    assert shape(grouped(p)) == ["Alloc", "Alloc", "Alloc", [1, 3, 6], "Drop", "Drop", "Return"]
    assert [at for at, _ in grouped(p)] == [0, 2, 5, 1, 4, 7, 8]


def test_what_stands_in_a_block_is_not_dropped():
    p = program(alloc("a"), kernel("x", "a"), alloc("b"), kernel("a", "b"), Drop("a"), kernel("b", "x"))
    assert shape(grouped(p, {"a"})) == ["Alloc", "Alloc", [1, 3, 5], "Return"]


def test_large_memory_is_not_held_for_later_kernels():
    p = program(alloc("a", SMALL + 4), kernel("x", "a"), Drop("a"), kernel("x"))
    assert shape(grouped(p)) == ["Alloc", [1], "Drop", [3], "Return"]
    many = [s for i in range(3) for s in (alloc(f"a{i}", SMALL // 2), kernel(f"a{i}"), Drop(f"a{i}"))]
    assert shape(grouped(program(*many))) == ["Alloc", "Alloc", "Alloc", [1, 4, 7], "Drop", "Drop", "Drop", "Return"]
    assert shape(grouped(program(*many, kernel("x")))) == ["Alloc", "Alloc", "Alloc", [1, 4, 7], "Drop", "Drop", "Drop", [9], "Return"]


@pytest.mark.parametrize("known, expected", [({"x": SMALL}, [[0, 2], "Drop", "Return"]), ({"x": SMALL + 1}, [[0], "Drop", [2], "Return"]),
                                             ({}, [[0], "Drop", [2], "Return"])])
def test_inputs_are_held_when_they_are_known_to_be_small(known, expected):
    assert shape(grouped(program(kernel("x"), Drop("x"), kernel("y"), spans=known))) == expected


def test_what_ends_a_group():
    others = kernel("x", on="cuda:1"), kernel("x", on="cpu"), Launch("c", (("ptr", "x"),))
    for between in (call("x"), Copy(Ref("x"), Ref("y")), Let("n", "1"), *others):
        found = shape(grouped(program(kernel("x"), between, kernel("x"))))
        assert found == [[0], [1] if isinstance(between, Launch) and between.grid else type(between).__name__, [2], "Return"]


def test_a_program_may_end_with_a_launch():
    assert shape(grouped(Program("p", ("x",), (kernel("x"), alloc("a", 4), kernel("x", "a"), Drop("a"))))) == ["Alloc", [0, 2], "Drop"]


def test_launches_alone():
    assert shape(grouped(program(kernel("x"), kernel("x")), alone=True)) == [[0], [1], "Return"]


# -- one block for small values ------------------------------------------------------------------------------------------
def test_values_that_no_launch_needs_together_share_bytes():
    p = program(alloc("a"), kernel("x", "a"), alloc("b"), kernel("a", "b"), alloc("c"), kernel("b", "c"), kernel("c"))
    found = layout(p)
    assert found.places["a"] == found.places["c"] == 0 and found.places["b"] == 512 and found.size == 912 and found.device == ON


def test_only_small_values_that_kernels_alone_see_are_in_the_block():
    steps = [alloc("shown"), alloc("called"), alloc("copied"), alloc("big", SMALL + 4), alloc("symbolic", text="n"), alloc("out", kind="output"),
             alloc("else", on="cuda:1"), alloc("unused"), alloc("empty", 0), alloc("a"), alloc("b")]
    p = Program("p", ("x",), (*steps, kernel("shown", "called", "copied", "big", "symbolic", "out", "else", "empty", "a", "b"), call("called"),
                              Copy(Ref("x"), Ref("copied")), Return((Ref("shown"),))))
    assert set(layout(p).places) == {"a", "b"}


def test_one_value_needs_no_block():
    assert layout(program(alloc("a"), kernel("a"))) is None and layout(program()) is None


def test_the_block_stays_small():
    p = program(*(alloc(f"a{i}", SMALL // 4) for i in range(7)), kernel(*(f"a{i}" for i in range(7))))
    found = layout(p)
    assert len(found.places) == 4 and found.size <= SMALL


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(1, 5000)), min_size=2, max_size=12))
def test_what_is_alive_together_lies_apart(wanted):
    launches = [[f"v{i}" for i, (a, b, _) in enumerate(wanted) if at in (a, b)] for at in range(13)]
    p = program(*(alloc(f"v{i}", 4 * n) for i, (_, _, n) in enumerate(wanted)), *(kernel(*names) for names in launches))
    found = layout(p)
    assert set(found.places) == {f"v{i}" for i in range(len(wanted))}
    for i, (a, b, n) in enumerate(wanted):
        begin = found.places[f"v{i}"]
        assert begin % 512 == 0 and begin + 4 * n <= found.size
        for j, (c, d, m) in enumerate(wanted[:i]):
            other = found.places[f"v{j}"]
            alive = max(min(a, b), min(c, d)) <= min(max(a, b), max(c, d))
            assert not alive or begin + 4 * n <= other or other + 4 * m <= begin


# -- a Group at work -----------------------------------------------------------------------------------------------------
def arrived(fake):
    return [(s.function, list(s.shape[:3]), s.stream, s.arguments[0], s.small, struct.unpack("d", struct.pack("q", s.arguments[2]))[0])
            for s in fake.launches]


def test_values_are_added_to_what_is_known(fake, launch):
    a, b = fake.kernel(launch).on("cuda:0"), fake.kernel(launch).on("cuda:0")
    words = lambda *w: tuple(x if isinstance(x, Word) else Word(x) for x in w)
    run = Run([(a, words(5, Word(0, 2), 1, Word(32, 0), -3, 2.5)), (b, words(1, 1, 1, Word(64, 0), Word(0, 2), Word(0, 1))),
               (a, words(2, 1, 1, 16, 7, -0.0))], (False, True, False))
    for base, x, n in ((1 << 46, -1.0, 9), (160, float("inf"), 3)):                     # the first call loads
        before = len(fake.launches)
        assert run.call(77, base, x, n) == 0
        assert arrived(fake)[before:] == [(a.variants[0].binary.code.split(b"\0")[0], [5, n, 1], 77, base + 32, -3, 2.5),
                                          (b"k0", [1, 1, 1], 77, base + 64, n, x), (b"k0", [2, 1, 1], 77, 16, 7, 0.0)]
    assert [struct.pack("q", s.arguments[2]) for s in fake.launches[2::3]] == [struct.pack("d", -0.0)] * 2


def test_a_launch_that_is_refused_is_finished_and_the_rest_follows(fake, launch):
    placed = fake.kernel(launch, divisible=frozenset({0})).on("cuda:0")
    run = Run([(placed, (Word(1), Word(1), Word(1), Word(0, i), Word(i), Word(0.0))) for i in range(3)], (False,) * 3)
    for at in ((16, 8, 32), (16, 8, 32), (8, 16, 24)):
        run.call(1, *at)
    assert [(s.function, s.arguments[0], s.small) for s in fake.launches] == [
        (b"k" if a % 16 else b"k0", a, i) for at in ((16, 8, 32), (16, 8, 32), (8, 16, 24)) for i, a in enumerate(at)]


def test_a_failure_is_raised_and_nothing_follows(fake, launch):
    placed = fake.kernel(launch).on("cuda:0")
    run = Run([(placed, (Word(n), Word(1), Word(1), Word(16), Word(1), Word(0.0))) for n in (1, 1 << 31, 1)], ())
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"the kernel k .* grid \(2147483648, 1, 1\)"):
            run.call(7)
    assert len(fake.launches) == 2


@pytest.mark.parametrize("values, error", [((1.5, 0.5), TypeError), (("a", 0.5), TypeError), ((1, "a"), TypeError), ((1 << 70, 0.5), OverflowError),
                                           ((1,), TypeError), ((1, 0.5, 2), TypeError), ((-1, -1.0), None), ((True, 3), None)])
def test_values_of_a_wrong_kind_are_refused(fake, values, error):
    placed = fake.kernel(gpu.launcher()).on("cuda:0")
    run = Run([(placed, (Word(1), Word(1), Word(1), Word(16), Word(0, 0), Word(0, 1)))], (False, True))
    if error is None:
        run.call(7, *values)
        run.call(7, *values)
    else:
        with pytest.raises(error):
            run.call(7, *values)
    assert arrived(fake) == ([(b"k0", [1, 1, 1], 7, 16, int(values[0]), float(values[1]))] * 2 if error is None else [])


def test_in_python_what_is_ordinary_is_ready_before_a_call(fake):
    placed = fake.kernel(gpu.launch_in_python).on("cuda:0")
    words = (Word(3), Word(1), Word(1), Word(64, 0), Word(0, 1), Word(0, 2))
    run = Run([(placed, words), (placed, words)], (False, False, True))
    asked = []
    rest, run.rest = run.rest, None
    run.call.__globals__["rest"] = lambda *args: (asked.append(args[0]), rest(*args))[1]
    for address in (16, 32, 48, 8):                     # the first loads; the last is less aligned than the kernel assumes
        run.call(5, address, 7, -0.0)
    assert asked == [0, 0]
    assert [(s.function, s.arguments[0], s.small, list(s.shape), s.stream) for s in fake.launches] == [
        (b"k0" if a % 16 == 0 else b"k", 64 + a, 7, [3, 1, 1, 128, 1, 1, 0], 5) for a in (16, 32, 48, 8) for _ in range(2)]
    assert all(struct.pack("q", s.arguments[2]) == struct.pack("d", -0.0) and list(s.arguments[3:5]) == [0, 0] for s in fake.launches)


@pytest.mark.parametrize("fields, grid", [({"cooperative": True}, (1, 1, 1)), ({}, (0, 1, 1)), ({}, (1, 1 << 31, 1))])
def test_in_python_the_rest_goes_launch_by_launch(fake, fields, grid):
    placed = fake.kernel(gpu.launch_in_python, **fields).on("cuda:0")
    run = Run([(placed, (*map(Word, grid), Word(16), Word(1), Word(0.0)))], ())
    for _ in range(2):
        if grid[1] >> 31:
            with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE"):
                run.call(5)
        else:
            run.call(5)
    assert [s.together for s in fake.launches] == [1, 1] * (grid == (1, 1, 1))


def test_clusters_and_shared_memory_are_in_a_frame(fake):
    kernel = fake.kernel(gpu.launch_in_python, cluster=4)
    kernel.binary = replace(kernel.binary, shared=100_000)
    run = Run([(kernel.on("cuda:0"), (Word(8), Word(1), Word(1), Word(16), Word(1), Word(0.0)))], ())
    for stream in (1, 2, 2, 1):
        run.call(stream)
    assert len(run.call.__globals__["free"]) == 1
    assert [(s.together, s.shape[6], s.stream) for s in fake.launches] == [(-4, 100_000, n) for n in (1, 2, 2, 1)]


# -- many launches are a graph --------------------------------------------------------------------------------------------
MANY = gpu_launcher.FEWEST + 3


def many(fake, **fields):
    """A run of MANY launches with a grid, an address and a number of a call's."""
    placed = fake.kernel(gpu.launcher(), **fields).on("cuda:0")
    return Run([(placed, (Word(0, 2), Word(1), Word(1), Word(16 * i, 0), Word(0, 1), Word(0.5 * i))) for i in range(MANY)], (False,) * 3)


def expected(stream, address, number, grid, names=(b"k0", b"k")):
    return [(names[address % 16 != 0], [grid, 1, 1], stream, address + 16 * i, number, 0.5 * i) for i in range(MANY)]


def counts(fake) -> list[int]:
    return [fake.number(name).value for name in ("made", "set", "replayed")]


def test_many_launches_are_a_graph_with_what_each_call_gives(fake):
    run = many(fake)
    calls = [(5, 160, 7, 3), (6, 320, -8, 4), (7, 480, 9, 5), (8, 640, 10, 6), (9, 648, 11, 7), (9, 656, 12, 8), (9, 664, 13, 9)]
    for stream, *values in calls:
        assert run.call(stream, *values) == 0
    assert arrived(fake) == [x for call in calls for x in expected(*call)]              # the fifth is less aligned, and makes a variant
    assert (gpu_launcher.TURNS, gpu_launcher.OFTEN) == (2, 1)       # graphs of the fourth, sixth and seventh: the first loads, the next are the first
    assert counts(fake)[0] == 2 and counts(fake)[2] == 3 and fake.number("mode").value == 0             # of each turn
    before = fake.number("ended").value
    del run
    gc.collect()
    assert before == 1 and fake.number("ended").value == before + 4             # one that could not be made; two graphs as written and as launched


def test_few_launches_are_no_graph(fake):
    placed = fake.kernel(gpu.launcher()).on("cuda:0")
    run = Run([(placed, (Word(1), Word(1), Word(1), Word(16), Word(1), Word(0.0)))] * (gpu_launcher.FEWEST - 1), ())
    for _ in range(6):
        run.call(7)
    assert not fake.number("graphs").value and len(fake.launches) == 6 * (gpu_launcher.FEWEST - 1)


def test_what_a_graph_cannot_be_is_launched_one_by_one(fake):
    run = many(fake)
    for _ in range(5):
        run.call(1, 16, 1, 1)
    before = counts(fake)
    assert before[0] == before[2] == 2
    fake.number("captures").value = 1           # the stream is captured: the kernels are to be in that graph
    run.call(1, 16, 2, 1)
    fake.number("captures").value = 0
    assert arrived(fake)[-MANY:] == expected(1, 16, 2, 1) and counts(fake) == before
    run.call(1, 16, 3, 0)                       # no programs, no launches
    assert len(fake.launches) == 6 * MANY and counts(fake)[2] == before[2]
    run.call(1, 16, 4, 2)
    assert arrived(fake)[6 * MANY:] == expected(1, 16, 4, 2) and counts(fake)[2] == before[2] + 1
    fake.number("answer").value = 700
    with pytest.raises(RuntimeError, match="could not be launched"):
        run.call(1, 16, 5, 2)
    fake.number("answer").value = 0
    run.call(1, 16, 6, 2)
    assert arrived(fake)[7 * MANY:] == expected(1, 16, 6, 2)


def test_what_is_launched_together_is_no_graph(fake):
    run = many(fake, cooperative=True)
    for n in range(9):
        run.call(1, 16, n, 8)
    assert len(fake.launches) == 9 * MANY and counts(fake) == [0, 0, 0] and fake.number("ended").value == fake.number("graphs").value <= 8
    assert {s.together for s in fake.launches} == {1}


def test_clusters_have_their_size_in_a_graph(fake):
    run = many(fake, cluster=4)
    for n in range(9):
        run.call(1, 16, n, 8)
    assert len(fake.launches) == 9 * MANY and counts(fake)[0] == 2 and counts(fake)[2] > 0
    assert {s.together for s in fake.launches} == {-4}


def test_a_driver_that_makes_no_graphs(fake):
    fake.number("refused").value = 801
    run = many(fake)
    for n in range(9):
        run.call(1, 16, n, 2)
    assert arrived(fake) == [x for n in range(9) for x in expected(1, 16, n, 2)]
    assert 0 < fake.number("graphs").value <= gpu_launcher.TURNS * (gpu_launcher.TRIES + 1)
    fake.driver.graphs = None
    fake.number("refused").value = 0
    run = many(fake)
    for n in range(5):
        run.call(1, 16, n, 2)
    assert arrived(fake)[9 * MANY:] == [x for n in range(5) for x in expected(1, 16, n, 2)] and counts(fake) == [0, 0, 0]


@pytest.mark.parametrize("several", [2, MANY])
def test_threads_do_not_mix_their_values(fake, launch, several):
    placed = fake.kernel(launch).on("cuda:0")
    run = Run([(placed, (Word(1), Word(1), Word(1), Word(0, 0), Word(0, 1), Word(0.0))) for _ in range(several)], (False, False))
    run.call(0, 16, 0)

    def work(n: int):
        for _ in range(3):
            run.call(n, 16 * n, n)
    in_threads(work, [(n,) for n in range(1, 8)])
    assert sorted((s.stream, s.arguments[0], s.small) for s in fake.launches[several:]) == sorted((n, 16 * n, n) for n in range(1, 8)
                                                                                              for _ in range(3 * several))


def test_a_program_makes_one_call_of_a_chain(fake, device, launch):
    """x -> y through two small values: three launches, one block, addresses inside it."""
    words = lambda a, n: (("ptr", a), ("int", n), ("float", "0.5"))
    step = lambda a, n: Launch("k", words(a, n), grid=("n", "1", "1"), device="cuda:1")
    p = Program("p", ("x",), (Let("n", "x.shape[0]"), alloc("a", on="cuda:1"), step("a", "n"), alloc("b", on="cuda:1"), step("b", "2"),
                              step("a", "3"), Drop("a"), alloc("y", kind="output", on="cuda:1"), step("y", "4"), step("b", "5"), Drop("b"),
                              Return((Ref("y"),))))
    text = source(p)
    assert text.count("tk_r") == 1 and "tk_m = tk_empty_gpu((912,), (1,), tk_uint8)" in text and "del" not in text
    fn = assemble(p, {"k": fake.kernel(launch)})
    for n in (8, 9):
        before = len(fake.launches)
        y, = fn([torch.empty(n)])
        seen = fake.launches[before:]
        block = seen[0].arguments[0]
        assert [s.arguments[0] for s in seen] == [block, block + 512, block, y.data_ptr(), block + 512]
        assert [s.small for s in seen] == [n, 2, 3, 4, 5] and all(list(s.shape[:3]) == [n, 1, 1] and s.stream == 701 for s in seen)
    assert device.log == ["stream 1", "empty on 1", "empty on 1"] * 2


def test_numbers_of_addresses_know_where_the_block_is(fake, device, launch):
    text = "abs(({a} + 4 * (n)) - ({x}))"
    step = lambda a, *number: Launch("k", (("ptr", a), number, ("float", "0.5")), grid=("1", "1", "1"), device=ON)
    p = Program("p", ("x",), (Let("n", "x.shape[0]"), alloc("a"), step("a", "int", "1"), alloc("b"), step("b", "addresses", f"{text} - {text} + 3"),
                              step("a", "addresses", "{b} - {a}"), Return(())))
    assert set(layout(p).places) == {"a", "b"} and set(read(p.steps[4])) == {"b", "a", "x"} and names_in(p.steps[4]) == {"n"}
    fn = assemble(p, {"k": fake.kernel(launch)})
    for _ in range(2):
        fn([torch.empty(8)])
    base = fake.launches[0].arguments[0]
    assert [(s.arguments[0] - base, s.small) for s in fake.launches[:3]] == [(0, 1), (512, 3), (0, 512)]
