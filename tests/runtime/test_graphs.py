"""When a recording is made, replayed, and let go; and how programs are cut. On the CPU, with a recorder that makes the calls again."""
from __future__ import annotations

import threading

import pytest
import torch

from tests.runtime.replaying import StandIn
from tokamak.runtime import graphs
from tokamak.runtime.graphs import Recorded
from tokamak.runtime.pieces import joined, marked, split
from tokamak.runtime.program import Alloc, Call, Copy, Drop, Host, Let, Program, Ref, Return, TensorSpec, assemble


def recorded(fn, tensors=1, **options) -> Recorded:
    def boxed(args):
        values = list(args)
        args.clear()
        return list(fn(*values))
    return Recorded(boxed, StandIn(), tensors, **options)


def warm(r: Recorded, *args) -> None:
    for _ in range(graphs.WARM):
        r(list(args))


def test_the_third_call_is_recorded():
    r, x = recorded(lambda x: [x * 2]), torch.arange(3.0)
    for n in range(1, 5):
        assert r([x])[0].tolist() == [0, 2, 4]
        assert (r.counts.plain, r.counts.recordings, r.counts.replays) == (min(n, 2), n > 2, max(n - 2, 0))


def test_results_of_a_replay_are_fresh_tensors_of_the_same_memory():
    r, x = recorded(lambda x: [x * 2]), torch.arange(3.0)
    warm(r, x)
    y = r([x])[0]
    first = y.data_ptr()
    y.add_(1)
    del y
    y = r([x])[0]
    assert y.data_ptr() == first and y.tolist() == [0, 2, 4] and y._version == 0 and not y._is_view() and not y.requires_grad


@pytest.mark.parametrize("holder", [lambda y: y, lambda y: y[1:], lambda y: y.detach(), lambda y: y.numpy(), lambda y: y.untyped_storage(),
                                    lambda y: torch.utils.dlpack.to_dlpack(y), lambda y: torch.nn.Parameter(y), lambda y: (y * 1.0, y)[1]])
def test_what_is_held_is_not_written(holder):
    r, x = recorded(lambda x: [x * 2]), torch.ones(4)
    warm(r, x)
    y = r([x])[0]
    address, kept = y.data_ptr(), holder(y)
    del y
    for _ in range(3):
        z = r([x])[0]
        assert z.data_ptr() != address
    del kept
    assert address in {t.data_ptr() for t in [r([x])[0] for _ in range(graphs.GENERATIONS)]}


def test_when_all_are_held_results_are_copied_out():
    r, x, kept = recorded(lambda x: [x * 2, x + 1]), torch.ones(4), []
    warm(r, x)
    for n in range(10):
        x.fill_(n)
        kept.append(r([x]))
    assert [y.tolist() for y, _ in kept] == [[2.0 * n] * 4 for n in range(10)] and [z[0] for _, z in kept] == [n + 1 for n in range(10)]
    assert r.counts.recordings == graphs.GENERATIONS + 1 and r.counts.replays == 10 and r.counts.dropped == graphs.GENERATIONS


def test_a_small_result_that_outlives_its_step_costs_no_second_set_of_large_ones(monkeypatch):
    monkeypatch.setattr(graphs, "CHEAP", 0)
    r, x, losses = recorded(lambda x: [x.sum(), x * 2]), torch.ones(1024), []
    warm(r, x)
    for n in range(8):
        x.fill_(n)
        loss, saved = r([x])
        assert saved[0] == 2 * n
        losses.append(loss)
        del loss, saved
    assert [float(v) for v in losses] == [1024.0 * n for n in range(8)]
    assert r.counts.recordings == 2 and r.counts.dropped == 1


def test_an_input_from_few_addresses_is_read_in_place():
    r, xs = recorded(lambda x: [x * 2]), [torch.full((4,), float(n)) for n in range(2)]
    warm(r, xs[0])
    for n in range(10):
        assert r([xs[n % 2]])[0][0] == 2 * (n % 2)
    assert r.counts.recordings == 2 and r.counts.copied == 0 and r.counts.replays == 10


def test_an_input_from_ever_new_addresses_is_copied():
    r, kept = recorded(lambda x, w: [x * w], tensors=2), []
    w = torch.full((4,), 3.0)
    for n in range(12):
        kept.append(torch.full((4,), float(n)))
        assert r([kept[-1], w])[0][0] == 3 * n
    assert r.counts.recordings == 1 and r.counts.copied == 16 * r.counts.replays
    w = torch.full((4,), 5.0)                   # a parameter that moved once is no reason to copy it from now on
    for n in range(5):
        kept.append(torch.full((4,), float(n)))
        assert r([kept[-1], w])[0][0] == 5 * n
    assert r.counts.recordings == 2 and r.counts.copied == 16 * r.counts.replays


def test_a_copied_input_that_is_written_is_copied_back():
    r, kept = recorded(lambda x: [x.add_(1) * 2], written=frozenset({0})), []
    for n in range(8):
        kept.append(torch.full((4,), float(n)))
        assert r([kept[-1]])[0][0] == 2 * (n + 1) and kept[-1].tolist() == [n + 1.0] * 4
    assert r.counts.replays == 6


def test_repeated_strides_and_gaps_are_copied():
    r, kept = recorded(lambda x: [x.sum(0)]), []
    for n in range(6):
        kept.append(torch.arange(40.0)[n:n + 30].as_strided((3, 4, 5), (10, 0, 2)))
        assert torch.equal(r([kept[-1]])[0], kept[-1].sum(0))
    assert r.counts.replays and r.counts.copied


def test_numbers_choose_the_recording_and_old_ones_go(monkeypatch):
    monkeypatch.setattr(graphs, "SIZES", 2)
    r, x = recorded(lambda x, n: [x * n]), torch.ones(4)
    for n in (2, 3, 2, 3, 2, 3, 2, 3):
        assert r([x, n])[0][0] == n
    assert r.counts.recordings == 2 and r.counts.replays == 4 and not r.counts.dropped
    for _ in range(4):
        assert r([x, 5])[0][0] == 5
    assert set(r.entries) == {(3,), (5,)} and r.counts.dropped == 1


def test_zeros_of_two_signs_are_two_numbers():
    r, x = recorded(lambda x, n: [x * n]), torch.ones(4)
    for n in (0.0, -0.0) * 6:
        assert torch.equal(torch.signbit(r([x, n])[0]), torch.signbit(x * n))
    assert r.counts.recordings == 2


def test_sizes_that_come_and_go_are_recorded_ever_later(monkeypatch):
    monkeypatch.setattr(graphs, "SIZES", 1)
    r, x = recorded(lambda x, n: [x * n]), torch.ones(4)
    for n in range(40):
        for _ in range(4):
            assert r([x, n])[0][0] == n
    assert r.counts.recordings < 4 and r.patience > graphs.WARM


def test_what_raises_while_it_is_recorded_runs_plainly_and_says_so_once():
    told = []

    def fail(args):
        raise RuntimeError("cannot be captured")
    r = recorded(lambda x: [x * 2], capture=lambda: fail, failed=told.append)
    for _ in range(6):
        assert r([torch.ones(2)])[0].tolist() == [2, 2]
    assert len(told) == 1 and r.counts.replays == 0 and "cannot be captured" in r.broken


def test_a_thread_that_has_not_called_it_records_nothing():
    """What libraries set up for each thread is set up by a plain call."""
    r, x, seen = recorded(lambda x: [x * 2]), torch.ones(2), []
    warm(r, x)

    def run():
        for _ in range(2):
            seen.append((r([x])[0].tolist(), r.counts.recordings))
    worker = threading.Thread(target=run)
    worker.start()
    worker.join()
    assert seen == [([2, 2], 0), ([2, 2], 1)]


def test_errors_that_kernels_left_in_plain_calls_are_raised_by_a_replay():
    """Of the first call, of other plain ones, and of replays: each kind of function has words of its own."""
    left: list[str] = []

    def leaving(name: str):
        def boxed(args):
            return [args.pop() * 2]

        def pending():
            if name in left:
                left.remove(name)
                raise IndexError(name)
        boxed.pending = pending
        return boxed
    captured = leaving("captured")
    r, x = Recorded(leaving("plain"), StandIn(), 1, probe=leaving("first"), capture=lambda: captured), torch.ones(2)
    warm(r, x)
    for _ in range(2):
        r([x])
        for name in ("first", "plain", "captured"):
            left.append(name)
            with pytest.raises(IndexError, match=name):
                r([x])
    assert r([x])[0].tolist() == [2, 2] and r.counts.plain == graphs.WARM and r.counts.replays == 3


def test_paused_calls_run_plainly():
    on = []
    r, x = recorded(lambda x: [x * 2], paused=lambda: bool(on)), torch.ones(2)
    warm(r, x)
    r([x])
    on.append(1)
    r([x])
    assert r.counts.replays == 1 and r.counts.plain == graphs.WARM + 1


def test_recordings_that_are_gone_own_no_memory():
    r, x = recorded(lambda x: [x * 2]), torch.ones(4)
    warm(r, x)
    y = r([x])[0]
    assert y.data_ptr() in r.recorder.owned
    r.clear()
    assert not r.recorder.owned and y.tolist() == [2] * 4


# -- cutting -----------------------------------------------------------------------------------------------------------------
def spec(*shape, device="cpu", dtype=torch.float32):
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * shape[i + 1]
    return TensorSpec(tuple(map(str, shape)), tuple(map(str, strides)), dtype, device)


def call(target, out, *args, result=None):
    return Call(target, args, {}, ((out, result or spec(4)),), True)


ADD, MUL = torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor


def program(*steps, inputs=("x",), devices=None) -> Program:
    return Program("cut", inputs, tuple(steps), devices=devices or {"x": "cpu"})


def chain(*more) -> Program:
    return program(call(ADD, "a", Ref("x"), 1), Drop("x"), call(MUL, "b", Ref("a"), 2), *more, Return((Ref("b"), Ref("a"))))


def run(p: Program, cut, *args):
    functions = {piece: assemble(piece.program, {}) for piece in cut.pieces}
    outer, origins = joined(cut, functions)
    assert len(origins) == len(outer.steps)
    return assemble(outer, {})(list(args))


def test_a_program_of_one_device_is_one_piece():
    p = chain()
    cut = split(p, frozenset({"cpu"}))
    piece, = cut.pieces
    assert piece.positions == (0, 2) and piece.tensors == ("x",) and not cut.left and cut.total == 2
    assert [v.tolist() for v in run(p, cut, torch.ones(4))] == [[4] * 4, [2] * 4]


def test_nothing_is_recorded_where_nothing_records():
    cut = split(chain(), frozenset({"cuda"}))
    assert not cut.pieces and {x.reason for x in cut.left} == {"it runs on cpu"}
    assert [v.tolist() for v in run(chain(), cut, torch.ones(4))] == [[4] * 4, [2] * 4]


def test_what_was_refused_stands_between_pieces():
    p = program(call(ADD, "a", Ref("x"), 1), call(MUL, "b", Ref("a"), 2), call(ADD, "c", Ref("b"), 3), call(MUL, "d", Ref("c"), Ref("a")),
                call(ADD, "e", Ref("d"), 5), Return((Ref("e"), Ref("x"))))
    cut = split(p, frozenset({"cpu"}), {2: "no"})
    assert [piece.positions for piece in cut.pieces] == [(0, 1), (3, 4)] and [(x.position, x.reason) for x in cut.left] == [(2, "no")]
    assert cut.pieces[1].tensors == ("c", "a")
    x = torch.ones(4)
    e, same = run(p, cut, x)
    assert e.tolist() == [(2 * 2 + 3) * 2 + 5] * 4 and same is x


def test_calls_that_wait_and_numbers_of_tensors_are_left_out():
    waits = call(torch.ops.aten.nonzero.default, "n", Ref("a"), result=spec(4, 1, dtype=torch.int64))
    cut = split(chain(waits), frozenset({"cpu"}))
    assert [x.reason for x in cut.left] == ["it waits for the device"] and cut.left[0].name == "aten.nonzero.default"
    number = call(ADD, "n", Ref("a"), Host("x.sum().item()"))
    assert "takes a number from memory" in split(chain(number), frozenset({"cpu"})).left[0].reason
    counted = split(program(Let("m", "k*2"), call(ADD, "a", Ref("x"), Host("m")), call(ADD, "b", Ref("a"), Host("k + 1")), Return((Ref("b"),)),
                            inputs=("x", "k")), frozenset({"cpu"}))
    assert not counted.left and counted.pieces[0].program.inputs == ("x", "k", "m")
    assert run(counted.program, counted, torch.ones(4), 3)[0].tolist() == [1 + 6 + 4] * 4


def test_one_launch_alone_is_not_worth_a_graph():
    product = call(torch.ops.aten.mm.default, "a", Ref("x"), Ref("x"), result=spec(2, 2))
    for step in (product, call(ADD, "a", Ref("x"), 1)):
        p = program(step, Return((Ref("a"),)))
        cut = split(p, frozenset({"cpu"}))
        assert not cut.pieces and "too few" in cut.left[0].reason
    assert run(p, cut, torch.ones(4))[0].tolist() == [2] * 4


def test_one_call_of_many_launches_is():
    p = program(call(torch.ops.aten.cumsum.default, "a", Ref("x"), 0), Return((Ref("a"),)))
    cut = split(p, frozenset({"cpu"}))
    assert [piece.positions for piece in cut.pieces] == [(0,)] and not cut.left and run(p, cut, torch.ones(4))[0].tolist() == [1, 2, 3, 4]


def test_memory_that_another_piece_fills_is_written_back():
    """What a piece gets uninitialised it may fill: its copy must reach the others."""
    p = program(Alloc("y", spec(4), "16"), call(ADD, "a", Ref("x"), 1), call(MUL, "b", Ref("a"), 2),
                Call(torch.sin, (Ref("b"),), {}, ((None, None),), True),
                Call(torch.ops.aten.add.out, (Ref("b"), 1), {"out": Ref("y")}, ((None, None),), True), Copy(Ref("x"), Ref("y")), Return((Ref("y"),)))
    cut = split(p, frozenset({"cpu"}), {3: "no"})
    assert cut.pieces[1].written == ("y", "x") or set(cut.pieces[1].written) == {"x", "y"}
    x = torch.ones(4)
    assert run(p, cut, x)[0].tolist() == [5] * 4 and x.tolist() == [5] * 4 and x._version >= 1


def test_results_are_made_between_marks():
    seen = []
    piece, = split(chain(call(MUL, "gone", Ref("b"), 3)), frozenset({"cpu"})).pieces
    noted = marked(piece, lambda: seen.append("keep"), lambda: seen.append("share"))
    assert len(noted.origins) == len(noted.program.steps)
    assemble(noted.program, {})([torch.ones(4)])
    assert seen == ["keep", "share"] * 2
