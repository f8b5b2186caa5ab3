"""What the stages record, and what is counted in it."""
import pytest
import torch

import tokamak
from tokamak.options import STAGES
from tokamak.tools.kernels import kernels, memory_operations
from tokamak.tools.names import FAMILIES, count_text, kernel_name, size_text
from tokamak.tools.dynamo import user_name
from tokamak.tools.record import Recorder, recording

from .programs import Block, chain, softmax


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def record(fn, *args, **options):
    """The records of the graphs of one call, forward and backward."""
    with recording(strict=True, **options) as seen:
        out = tokamak.compile(fn)(*args)
        if out.requires_grad:
            out.sum().backward()
    return seen.graphs


def kernel(fn, *args):
    found, = kernels(record(fn, *args)[0])
    return found


def test_captures_behind_those_that_torch_remembers_are_told_of_too():
    """It keeps what it says of the last 64: new ones may be where the memory of old ones was, and more may come while it is listened to."""
    def fn(x):
        y = x * 2
        torch._dynamo.graph_break()
        return y + 1
    with recording(strict=True) as seen:
        for _ in range(34):
            torch._dynamo.reset()
            tokamak.compile(fn)(torch.randn(4))
    assert len(seen.breaks) == 34
    assert torch._dynamo.utils._compilation_metrics.maxlen == 64
    for _ in range(3):
        torch._dynamo.reset()
        with recording(strict=True) as again:
            tokamak.compile(fn)(torch.randn(4))
        assert len(again.breaks) == 1


def test_every_stage_is_recorded_with_its_time():
    graph, = record(softmax, torch.randn(8, 32))
    assert graph.seconds.keys() == STAGES.keys() and all(t >= 0 for t in graph.seconds.values())
    assert graph.values.keys() >= STAGES.keys()


def test_nothing_is_recorded_unasked():
    recorder = Recorder()
    tokamak.compile(softmax)(torch.randn(8, 32))
    assert not recorder.graphs


def test_how_a_kernel_was_built(tmp_path):
    def how(**options):
        torch._dynamo.reset()
        return [u.how for g in record(chain, *(torch.randn(4, 24) for _ in range(3)), **options) for u in g.units.values()]
    assert how(cache_dir=str(tmp_path)) in (["compiled"], ["process"])
    assert how(cache_dir=str(tmp_path)) == ["process"]


def test_three_kernels_and_eight_memory_operations_become_one_and_four():
    graph, = record(chain, *(torch.randn(8, 32) for _ in range(3)))
    before, after = memory_operations(graph)
    assert (before.operations, before.accesses, before.bytes) == (3, 8, 8 * 1024)
    assert (after.operations, after.accesses, after.bytes) == (1, 4, 4 * 1024)


def test_views_are_no_memory_operations():
    graph, = record(lambda x: x.t().reshape(-1)[::2].unsqueeze(0) + 1, torch.randn(4, 1))
    assert [c.op for c in graph.calls if not c.view] == ["add.Tensor"]


def test_a_broadcast_counts_the_elements_that_there_are():
    found = kernel(lambda x, b: x * b, torch.randn(8, 32), torch.randn(32))
    assert [a.fewest for a in found.reads] == [1024, 128] and found.bytes == found.fewest == 1024 + 128 + 1024


def test_a_row_that_is_read_again_costs_nothing_while_the_cache_holds_it():
    found = kernel(softmax, torch.randn(64, 256))
    assert [a.name for a in found.reads] == ["x"] and found.bytes == found.fewest == 2 * 64 * 256 * 4


@pytest.mark.parametrize("family, fn", [
    ("poi", lambda x: x.exp() + 1), ("per", softmax), ("red", lambda x: x.sum(0)), ("scn", lambda x: x.cumsum(0)),
    ("sca", lambda x: torch.zeros(8).index_add(0, x[:, 0].long() % 8, x[:, 1]))])
def test_families(family, fn):
    names = [k.name for k in kernels(record(fn, torch.rand(64, 16) * 7)[0])]
    assert family in FAMILIES and any(n.startswith(f"{family}_fused_") for n in names), names


def test_names():
    assert kernel_name("poi", ("mul.Tensor", "_softmax.default", "add.Tensor"), 3) == "poi_fused_add_mul_softmax_3"
    assert kernel_name("per", tuple("abcdefgh"), 0) == "per_fused_a_b_c_d_e_f_2_more_0"
    assert user_name("L['self']._modules['fc']._parameters['weight']") == "fc.weight"
    assert user_name("L['ys'][0]") == "ys[0]"
    assert (size_text(512), size_text(2048), size_text(3 << 20), count_text(1.28e6)) == ("512 B", "2 KiB", "3 MiB", "1.28M")


def test_modules_and_parameters_by_the_users_names():
    forward, backward = record(Block(), torch.randn(4, 16))
    norm = kernels(forward)[0]
    assert norm.module == "norm" and {a.name for a in norm.reads} == {"x", "norm.weight", "norm.bias"}
    written = {a.name for k in kernels(backward) for a in k.writes}
    assert {"gradient of norm.weight", "gradient of norm.bias"} <= written


def test_what_torch_runs_says_why():
    graph, = record(lambda x: torch.stft(x, 8, return_complex=True), torch.randn(32))
    assert graph.eager or any(s.reason for s in graph.values["fuse"].steps if hasattr(s, "reason"))
