"""Folds down columns as C: a few rows at a time, whose columns stand in registers."""
import pytest
import torch
import torch.nn.functional as F

import tokamak
from tests.compiled.harness import agree
from tokamak.backend import compile_graph
from tokamak.capture import aot
from tokamak.tools.record import recording
from tokamak.tools.show import STAGE_TEXTS


def text(fn, *inputs):
    """The C of what `fn` becomes, and its result."""
    texts = []

    def one(graph, inputs, kind):
        def trace(stage, value):
            if stage == "render":
                texts.extend(k.text for k in value.values())
            return value
        return compile_graph(graph, inputs, tokamak.Options(), trace, kind)
    torch._dynamo.reset()
    out = torch.compile(fn, backend=lambda gm, inputs: aot.autograd(gm, inputs, one))(*inputs)
    return "\n".join(texts), out


def normalised(x):
    return (x - x.mean(0)) / (x.std(0) + 1e-5)


SIZES = [(3000, 5, torch.float32), (1000, 24, torch.bfloat16), (300, 64, torch.float64), (9, 5000, torch.float32), (700, 513, torch.float32)]


@pytest.mark.parametrize("rows, columns, dtype", [*SIZES, (300, 1024, torch.bfloat16)])
def test_columns_are_as_near_as_in_float64(rows, columns, dtype):
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(dtype) + 3
    for fn in (lambda x: x.sum(0), lambda x: x.var(0), normalised, lambda x: x.amax(0) - x, lambda x: (x * x.sum(0)).sum(0),
               lambda x: (x[:, 0] * x.T).sum(-1), lambda x: (x.double().cumsum(0)[-1] - x).mean(0)):
        agree(fn, [x])


def test_a_variance_beside_an_outlier_keeps_its_digits():
    x = torch.randn(20000, 24, generator=torch.Generator().manual_seed(0))
    x[77, 3], x[:, 5] = 1e4, x[:, 5] + 1e4
    got = tokamak.compile(lambda x: x.var(0), strict=True)(x)
    torch.testing.assert_close(got, x.double().var(0).float(), rtol=1e-5, atol=0)
    ones = torch.full((1 << 20, 3), 0.1)
    got = tokamak.compile(lambda x: x.sum(0), strict=True)(ones)
    torch.testing.assert_close(got, ones.double().sum(0).float(), rtol=1e-6, atol=0)


def test_what_a_column_divides_by_is_found_once():
    """Statistics of columns that a cache holds, and what depends on them: no quotient and no root stands in a loop over rows."""
    code, _ = text(normalised, torch.randn(500, 256))
    rows = [part.split("}")[0] for part in code.split("for (int64_t i1 = ")[1:]]
    assert rows and "sqrt" in code and not any("sqrt" in r or " / " in r for r in rows)


def test_columns_a_page_apart_are_folded_row_by_row():
    assert "for (int64_t ci1 = 0; ci1 < n1; ci1 += 8)" in text(normalised, torch.randn(300, 4096))[0]


def test_a_listing_shows_the_pieces_of_columns():
    torch._dynamo.reset()
    with recording(strict=True) as recorder:
        torch.compile(normalised, backend="tokamak")(torch.randn(300, 4096))
    assert "ci1 += 8) { const int64_t di1 = tk_min(ci1 + 8, n1);" in "\n".join(STAGE_TEXTS["render"](g) for g in recorder.graphs)


def test_two_sums_of_the_same_columns_share_a_loop():
    def sums(x, y):
        a, b = x.sum(0), (x * y).sum(0)
        return (x - a) * b
    x, y = torch.randn(300, 4096), torch.randn(300, 4096)
    code, got = text(sums, x, y)
    torch.testing.assert_close(got, sums(x, y), rtol=1e-4, atol=1e-3)
    assert code.count("for (int64_t ci1 = 0") == 1


def test_a_row_at_a_time_adds_no_columns_to_memory():
    code, _ = text(lambda x: x.sum(0), torch.randn(30000, 24))
    assert "for (int64_t i0 = at; i0 < top; i0++)" in code and "float *q" not in code


@pytest.mark.parametrize("fn", [lambda x: F.layer_norm(x.permute(0, 2, 3, 1), (96,)), lambda x: x.permute(0, 2, 3, 1).softmax(-1).contiguous()],
                         ids=["layer norm", "softmax"])
def test_rows_that_are_contiguous_in_their_results_alone_are_folded_as_columns(fn):
    """They are read three times and written once: the axis that is contiguous in what is read runs along lanes."""
    x = torch.randn(3, 96, 7, 5, generator=torch.Generator().manual_seed(0)) + 2
    agree(fn, [x])
    assert "loads_" not in text(fn, x)[0]


@pytest.mark.parametrize("height, width, carried", [(8, 5, False), (16, 8, False), (200, 3, True), (1, 40, True), (1, 129, True)])
def test_sums_of_small_windows_stay_in_f32(height, width, carried):
    """Those of one axis have one kernel, however long it is."""
    x = torch.rand(500, height, width + 2, generator=torch.Generator().manual_seed(0))[..., :width]
    agree(lambda x: x.sum((1, 2)), [x])
    assert ("lower_half" in text(lambda x: x.sum((1, 2)), x)[0]) is carried
