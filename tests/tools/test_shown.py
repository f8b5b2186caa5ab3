"""What else shows a profile: a trace for Perfetto, and a notebook."""
import json

import pytest
import torch

import tokamak
from tokamak.tools.chrome import apart, trace_events
from tokamak.tools.optimize import Rung, Staircase
from tokamak.tools.structure import structure

from . import samples
from .measured import measured  # noqa: F401 (a fixture)
from .programs import Block, branch
from .test_html import Elements


# -- the trace ---------------------------------------------------------------------------------------------------------------
def test_every_slice_has_what_is_known_of_its_kernel(measured, tmp_path):
    with open(measured.trace(tmp_path / "trace.json")) as file:
        events = json.load(file)["traceEvents"]
    ours = [e for e in events if e["ph"] == "X" and e["cat"] == "tokamak"]
    assert len(ours) == 4 + 3
    norm = next(e for e in ours if e["name"].startswith("per_fused_native_layer_norm"))["args"]
    row = next(r for r in measured.rows if r.name == norm["kernel"])
    assert norm["bytes"] == row.bytes and norm["FLOPs"] == row.flops and norm["schedule"] == row.schedule and norm["class"] == row.kind
    assert norm["percent of the limit"] == pytest.approx(100 * row.fraction, abs=0.01) and "self.norm(x)" in norm["lines"][0]
    assert next(e for e in ours if e["name"] == "addmm.default")["args"]["run by torch because"]


def test_it_is_chromes_format(measured):
    found = trace_events(json.loads(measured.to_json()))
    json.dumps(found, allow_nan=False)
    named = {(e["pid"], e["tid"]) for e in found["traceEvents"] if e["ph"] == "M" and e["name"] == "thread_name"}
    for e in found["traceEvents"]:
        assert e["ph"] in "XMC" and isinstance(e["pid"], int) and isinstance(e["tid"], int) and isinstance(e["name"], str)
        if e["ph"] == "X":
            assert e["ts"] >= 0 and e["dur"] >= 0 and ((e["pid"], e["tid"]) in named or e["name"] == "ProfilerStep#0")
        if e["ph"] == "C":
            assert all(isinstance(v, int) for v in e["args"].values())
    assert {e["args"]["name"] for e in found["traceEvents"] if e["name"] == "process_name"} == {"eager", "compiled"}


def test_what_overlaps_stands_on_tracks_of_its_own():
    slices = [{"start": a, "seconds": b - a} for a, b in ((0.0, 3.0), (1.0, 2.0), (2.0, 4.0), (3.0, 5.0), (3.5, 4.5))]
    assert [[(s["start"], s["start"] + s["seconds"]) for s in t] for t in apart(slices)] == [[(0, 3), (3, 5)], [(1, 2), (2, 4)], [(3.5, 4.5)]]


def test_slices_of_a_lane_follow_each_other(measured):
    lanes = {}
    for e in trace_events(measured.data())["traceEvents"]:
        if e["ph"] == "X" and e["tid"]:
            lanes.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    assert len(lanes) == 4
    for found in lanes.values():
        found.sort()
        assert all(a[1] <= b[0] + 1e-3 for a, b in zip(found, found[1:]))


# -- notebooks ---------------------------------------------------------------------------------------------------------------
def test_a_profile_in_a_notebook(measured):
    text = measured._repr_html_()
    page = Elements(text)
    assert not page.scripts and "table" in {t for t, _ in page.tags}
    for words in ("times as fast as eager", f"<b>{measured.bound}</b>", "peak memory", "per_fused_native_layer_norm_0", "programs.py:"):
        assert words in text, words


def test_a_profile_on_a_prompt(measured):
    assert repr(measured).startswith("<profile of Block: ") and len(repr(measured)) < 200


def test_an_explanation_in_a_notebook():
    torch._dynamo.reset()
    text = tokamak.explain(branch, torch.ones(4))._repr_html_()
    assert "became" in text and "graph break" in text and "schedule" in text and not Elements(text).scripts


def test_a_notebook_shows_text_as_text(measured):
    from dataclasses import replace
    nasty = replace(measured, why=samples.NASTY, rows=tuple(replace(r, name=samples.NASTY) for r in measured.rows))
    page = Elements(nasty._repr_html_())
    assert not page.scripts and "img" not in {t for t, _ in page.tags}


# -- what a kernel computes -----------------------------------------------------------------------------------------------------
def test_structure_is_without_names():
    text = "graph a {\n  input %x: f32[64](1)\n  hint s0 = 3\n  %y: f32[64](1) = mul(%x[i0], %x[i0])\n  return %y\n}"
    other = "graph b {\n  input %u: f32[64](1)\n  %v: f32[64](1) = mul(%u[i1], %u[i1])\n  return %v\n}"
    assert structure(text) == structure(other) and structure(text) != structure(text.replace("64", "65")) and structure(text) != structure(text, 1)
    two = other.replace("mul(%u[i1], %u[i1])", "mul(%u[i1], %w[i1])")
    assert structure(two) != structure(other)


def test_a_verification_in_a_notebook():
    torch._dynamo.reset()
    text = tokamak.verify(Block(), torch.randn(8, 16))._repr_html_()
    assert "per_fused_native_layer_norm_0" in text and "<pre" in text and not Elements(text).scripts


def test_a_staircase_in_a_notebook():
    rungs = (Rung("eager", 2e-3, 1 << 20, 1e-7, True, "where it starts", "", 1.0),
             Rung("fuse", 1e-3, 1 << 19, 1e-7, True, samples.NASTY, 'fn = torch.compile(fn, backend="tokamak")', 2.0))
    text = Staircase("cpu", rungs, "there are no contractions")._repr_html_()
    page = Elements(text)
    assert "2.00 times as fast as eager" in text and "there are no contractions" in text and "<pre" in text
    assert not page.scripts and "img" not in {t for t, _ in page.tags}
