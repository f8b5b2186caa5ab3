"""torch's call of a whole encoder layer, taken apart, against that call."""
import pytest
import torch

import tokamak

PAD = torch.arange(7)[None] >= torch.tensor([[3], [7]])
AHEAD = torch.ones(7, 7, dtype=torch.bool).triu(1)
MASKS = {"none": {}, "keys": {"src_key_padding_mask": PAD}, "all keys": {"src_key_padding_mask": PAD | torch.tensor([[True], [False]])},
         "ahead": {"src_mask": AHEAD}, "both": {"src_mask": AHEAD, "src_key_padding_mask": PAD}, "heads": {"src_mask": torch.rand(8, 7, 7) < 0.2},
         "weights": {"src_mask": torch.randn(7, 7).tril()}}


def layer(dtype=torch.float64, norm_first=False, activation="gelu"):
    torch.manual_seed(0)
    return torch.nn.TransformerEncoderLayer(32, 4, 48, 0.0, activation, batch_first=True, norm_first=norm_first, dtype=dtype).eval()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("norm_first", [False, True])
def test_it_is_what_the_call_gives(mask, norm_first):
    model = layer(norm_first=norm_first, activation="relu" if norm_first else "gelu")
    masks = {k: v if v.dtype is torch.bool else v.double() for k, v in MASKS[mask].items()}
    with torch.no_grad():
        for x in (torch.randn(2, 7, 32, dtype=torch.float64), torch.randn(7, 2, 32, dtype=torch.float64).transpose(0, 1)):
            mine, theirs = tokamak.compile(model, strict=True)(x, **masks), model(x, **masks)
            assert mine.stride() == theirs.stride()
            torch.testing.assert_close(mine, theirs, equal_nan=True)        # a row that leaves out all is NaN there


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types_are_as_near_as_the_call_is(dtype):
    model, exact, x = layer(dtype), layer(), torch.randn(2, 7, 32, dtype=dtype)
    exact.load_state_dict({k: v.double() for k, v in model.state_dict().items()})
    with torch.no_grad():
        true = exact(x.double())
        off = lambda y: (y.double() - true).norm()
        assert off(tokamak.compile(model, strict=True)(x)) < 1.5 * off(model(x))


def test_its_parts_are_planned_as_any_others():
    model, x = layer(torch.float32), torch.randn(2, 7, 32)
    with torch.no_grad():
        found = tokamak.explain(model, x)
    assert "_transformer_encoder_layer_fwd" not in str(found) and found.after.operations > 3 and "native_layer_norm" in str(found)


def test_a_layer_of_nothing_stays_a_call():
    model = layer(torch.float32)
    with torch.no_grad():
        assert tokamak.compile(model)(torch.randn(0, 7, 32)).shape == (0, 7, 32)
