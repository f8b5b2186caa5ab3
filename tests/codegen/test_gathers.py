"""Gathered rows as C: a row's number is one for all its columns."""
import pytest
import torch
import torch.nn.functional as F

import tokamak
from tokamak.tools.record import recording
from tokamak.tools.show import STAGE_TEXTS


@pytest.mark.parametrize("columns", [16, 33])
def test_a_gather_behind_a_guard_on_columns_fetches_its_row_once(columns):
    """Edges of a graph: what both ends have, side by side."""
    def scores(x, w, a, b):
        return (torch.cat([x[a], x[b]], -1) * w).sum(-1)
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(20, columns, generator=g), torch.randn(2 * columns, generator=g)
    a, b = (torch.randint(-20, 20, (50,), generator=g) for _ in range(2))
    torch._dynamo.reset()
    with recording(strict=True) as recorder:
        compiled = torch.compile(scores, backend="tokamak")
        torch.testing.assert_close(compiled(x, w, a, b), scores(x, w, a, b))
    text = "\n".join(STAGE_TEXTS["render"](g) for g in recorder.graphs)
    assert "tk_index(" in text and "tk_indices(" not in text and "loadgu_f32" in text
    for bad in (20, -21):
        with pytest.raises(IndexError):
            compiled(x, w, a, torch.full_like(b, bad))


def test_a_computed_row_is_taken_apart_beside_an_axis_that_it_does_not_know():
    """The gradient of rows added to every second row: the number of a gathered row is halved in a loop whose lanes run along columns."""
    def every_second(x, rows):
        return x.index_put((rows,), x[:1].expand(5, 2, 2) * 2, accumulate=True)[::2] * 1.5
    g = torch.Generator().manual_seed(0)
    x, rows = torch.randn(64, 2, 2, generator=g), torch.randint(0, 64, (5,), generator=g)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    torch._dynamo.reset()
    tokamak.compile(every_second, strict=True)(mine, rows).sum().backward()
    every_second(theirs, rows).sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad)


def test_rows_are_fetched_in_a_loop_inside_that_of_fetched_columns():
    """Prefixes down columns: the place of an element is known once both its row and its column are."""
    x = torch.arange(20.0).view(4, 5)
    rows, columns = torch.tensor([3, 0, 0, 2, 1, 3]), torch.tensor([4, 1, 1, 0])
    fn = lambda x, i, j: x[i[:, None], j].cumsum(0)
    torch._dynamo.reset()
    compiled = tokamak.compile(fn, strict=True, dynamic=True)
    torch.testing.assert_close(compiled(x, rows, columns), fn(x, rows, columns))
    with pytest.raises(IndexError):
        compiled(x, rows + 1, columns)
    doubled = lambda x: F.interpolate(x[None, None], scale_factor=2)[0, 0].cumsum(0)
    torch.testing.assert_close(tokamak.compile(doubled, strict=True, dynamic=True)(x), doubled(x))


UPDATES = [(r, d) for r in ("sum", "prod", "amax", "amin") for d in (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8)]
UPDATES += [("sum", torch.bfloat16), ("amax", torch.bfloat16), ("sum", torch.float16)]


@pytest.mark.parametrize("how, dtype", UPDATES, ids=lambda x: str(x).removeprefix("torch."))
@pytest.mark.parametrize("columns", [5, 51, 64])
def test_lanes_that_meet_in_one_element_update_it_in_turn(how, dtype, columns):
    def moved(x, at, into):
        return into.scatter_reduce(1, at.float().floor().long(), x * 2, how)
    g = torch.Generator().manual_seed(0)
    x, into = (torch.randint(0, 4, (20, columns), generator=g).to(dtype) for _ in range(2))
    at = torch.randint(0, 7, (20, columns), generator=g)
    into = torch.cat([into, into, into], 1)[:, :9].contiguous()
    torch._dynamo.reset()
    with recording(strict=True) as recorder:
        got = torch.compile(moved, backend="tokamak")(x, at, into)
    torch.testing.assert_close(got, moved(x, at, into))
    assert "tk_indices(" in "\n".join(STAGE_TEXTS["render"](g) for g in recorder.graphs)
    for bad in (9, -10):
        with pytest.raises((IndexError, RuntimeError)):
            torch.compile(moved, backend="tokamak")(x, torch.full_like(at, bad), into)


def test_updates_in_lanes_leave_out_those_that_are_guarded():
    """A table of one column, one of whose rows is padding and gets no gradient."""
    def looked_up(table, at):
        return torch.nn.functional.embedding(at, table, padding_idx=3)
    g = torch.Generator().manual_seed(0)
    table, at = torch.randn(10, 1, generator=g), torch.randint(0, 10, (101,), generator=g)
    mine, theirs = table.clone().requires_grad_(), table.clone().requires_grad_()
    torch._dynamo.reset()
    with recording(strict=True) as recorder:
        torch.compile(looked_up, backend="tokamak")(mine, at).square().sum().backward()
    looked_up(theirs, at).square().sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad)
    assert "[k]) store1_f32" in "\n".join(STAGE_TEXTS["render"](g) for g in recorder.graphs)


def test_lanes_do_not_run_across_images_that_lie_pages_apart():
    """Gradients of resampled images: 64 by 64 elements of float32 are four pages."""
    def doubled(x):
        return torch.nn.functional.interpolate(x, scale_factor=2, mode="bilinear") * 2
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    torch._dynamo.reset()
    with recording(strict=True) as recorder:
        torch.compile(doubled, backend="tokamak")(mine).square().sum().backward()
    doubled(theirs).square().sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad)
    assert "for (int64_t k = 0; k < W; k++) store1_f32" in "\n".join(STAGE_TEXTS["render"](g) for g in recorder.graphs)


RESIZED = {"enlarged": lambda x: F.interpolate(x, size=(29, 75), mode="bilinear"),
           "smaller": lambda x: F.interpolate(x, size=(9, 21), mode="bilinear"),
           "repeated": lambda x: F.pad(x.repeat(1, 1, 1, 4), (5, 3, 2, 1), mode="reflect"), "nearest": lambda x: F.interpolate(x, size=(17, 90))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("name", RESIZED)
def test_indices_that_all_rows_use_are_computed_once(name, dtype):
    """A picture's columns are read at places that are the same in every row: a thread keeps them, and its rows divide nothing."""
    if dtype is torch.int64 and name in ("enlarged", "smaller"):
        pytest.skip("torch resizes no integers so")
    x = torch.randn(2, 8, 13, 40, generator=torch.Generator().manual_seed(0)).mul(8).to(dtype)
    x = x if name != "nearest" or dtype.is_floating_point else x.float()
    torch._dynamo.reset()
    with recording(strict=True) as recorder:
        got = torch.compile(RESIZED[name], backend="tokamak", dynamic=False)(x)
    torch.testing.assert_close(got, RESIZED[name](x), atol=1e-4 if dtype is torch.float32 else None, rtol=1e-4 if dtype is torch.float32 else None)
    text = "\n".join(STAGE_TEXTS["render"](g) for g in recorder.graphs)
    rows = text[text.rindex("in parallel"):] if "loadw" in text else ""
    assert "loadw_" in rows and "lanes_div" not in rows and "load_i64(u" in rows


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("times", [1.5, 3, 7])
def test_an_index_and_its_weights_come_of_one_number(times, mode, dtype, dynamic):
    """(i + 0.5) / 3 - 0.5 is a whole number for every third i, or a little less than it where a kernel rounds once: its whole part, by which an image
    is read, and the rest, by which it is weighed, must be those of one of both."""
    enlarged = lambda x: F.interpolate(x, scale_factor=times, mode=mode)
    x = torch.randn(1, 2, 8, 9, dtype=dtype, generator=torch.Generator().manual_seed(0))
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    torch._dynamo.reset()
    got, wanted = tokamak.compile(enlarged, strict=True, dynamic=dynamic)(mine), enlarged(theirs)
    for r in (got, wanted):
        r.square().sum().backward()
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("shape, outputs, wide", [((2, 3, 56, 56), (13, 13), True), ((1, 2, 7, 9), (5, 4), False), ((3, 1, 5, 30), (7, 11), True)])
def test_quotients_of_places_are_taken_once_for_windows_that_share_them(shape, outputs, wide):
    """An adaptive pool's gradient: an element is divided by the size of its window before the windows of a position are summed. The end of a window
    is one for all lanes, where they run along it (`wide`)."""
    g = torch.Generator().manual_seed(0)
    pool = lambda x: F.adaptive_avg_pool2d(x, outputs)
    mine = torch.randn(shape, generator=g, requires_grad=True)
    theirs, along = mine.detach().clone().requires_grad_(), torch.randn((*shape[:2], *outputs), generator=g)
    torch._dynamo.reset()
    with recording(strict=True) as recorder:
        got = torch.compile(pool, backend="tokamak", dynamic=False)(mine)
        got.backward(along)
    torch.testing.assert_close(got, pool(theirs))
    pool(theirs).backward(along)
    torch.testing.assert_close(mine.grad, theirs.grad)
    (forward,), backward = ([b.text for b in graph.values["render"].values()] for graph in recorder.graphs)
    assert [text.count("cast_i64_f32") > 0 for text in backward] == [True, False]
    assert ("lane_of(" in forward) == wide
