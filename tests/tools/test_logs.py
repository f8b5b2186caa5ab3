"""TOKAMAK_LOGS: what each topic prints. The golden is the listing of one small kernel."""
import pytest
import torch

import tokamak
from tokamak.options import TOPICS

from .programs import Block, chain, line_of, softmax


@pytest.fixture
def logged(capsys):
    """logged(topic, fn, args): what the topic prints."""
    def call(topic, fn, *args):
        torch._dynamo.reset()
        torch.manual_seed(0)
        tokamak.compile(fn, logs=topic, strict=True, cudagraphs=topic == "cudagraphs")(*args)
        return capsys.readouterr().err
    return call


@pytest.mark.parametrize("topic", TOPICS)
def test_topics_print_under_a_title(logged, topic):
    assert logged(topic, softmax, torch.randn(8, 32)).startswith(f"-- tokamak {topic}: inference_")


def test_without_topics_nothing_is_printed(logged):
    assert logged("", softmax, torch.randn(8, 32)) == ""


def code(text: str) -> list[str]:
    """The lines of a listing's loop nest, without repeated blanks."""
    return [" ".join(line.split()) for line in text.splitlines()]


def test_the_listing_of_a_chain(logged):
    lines = code(logged("output_code", chain, *(torch.randn(8, 32) for _ in range(3))))
    n = line_of(chain, "x.pow")
    for wanted in ("float *p3; // output 0: f32[8, 32]", "const float *p0; // x: f32[8, 32]", "int64_t n0 = 256;",
                   f"v_f32 t1 = (t0 * t0); // pow_1, line {n}", f"v_f32 t3 = (t1 * t2); // mul, line {n + 1}",
                   "store_f32(p3 + (i0), t5); // output 0"):
        assert wanted in lines, "\n".join(lines)
    assert lines[1].startswith("// poi_fused_add_mul_pow_0: inference") and "typedef" not in " ".join(lines)


def test_folds_and_their_parts_are_named(logged):
    text = logged("output_code", softmax, torch.randn(8, 32))
    for words in ("// amax, line", "// sum_1, line", "// exp, line", "// output 0"):
        assert words in text, text


def test_fusion_prints_groups_and_reasons(logged):
    text = logged("fusion", Block(), torch.randn(4, 16))
    assert "per_fused_native_layer_norm_0" in text and "torch runs addmm.default: " in text
    assert "illegal: one side is a call of torch, not a kernel" in text


def test_schedule_prints_a_schedule_a_kernel(logged):
    text = logged("schedule", softmax, torch.randn(8, 32))
    assert "per_fused_" in text and "parallel(i0) vector(i1)" in text


def test_the_graph_prints_with_source_lines(logged):
    text = logged("graph", chain, *(torch.randn(8, 32) for _ in range(3)))
    assert "%mul: f32[8, 32](32, 1) = mul(" in text and "y = y * w" in text
