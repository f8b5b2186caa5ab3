"""The steps that `profiles` looks at: models of `gpu_zoo`, a token against a cache, small models of the tests, the programs of the examples."""
from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from . import gpu_graphs, gpu_zoo

EXAMPLES = Path(__file__).parent.parent / "examples"


@dataclass(frozen=True)
class Made:
    """A step: `fn` on its arguments; with `train` its gradients, too."""
    fn: Callable
    args: tuple = ()
    kwargs: dict = field(default_factory=dict)
    train: bool = False

    def step(self, fn: Callable) -> Callable[[], object]:
        """What makes a step of `fn`, which stands in the place of the function."""
        def forward():
            with torch.set_grad_enabled(self.train):
                return fn(*self.args, **self.kwargs)
        if not self.train:
            return forward
        out = forward()
        wanted, ones = leaves(out), torch.ones_like(out)
        return lambda: torch.autograd.grad(forward(), wanted, ones)


def leaves(out: torch.Tensor) -> list[torch.Tensor]:
    """What `out` has gradients for."""
    found, seen, todo = [], set(), [out.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found += [node.variable] if hasattr(node, "variable") else []
        todo += [n for n, _ in node.next_functions]
    return found


@dataclass(frozen=True)
class Case:
    """`make(device, layers)`: the step; `layers` None: as named. `options`: of the compiler."""
    make: Callable[[str, int | None], Made]
    options: dict = field(default_factory=dict)


def zoo(name: str, train: bool) -> Case:
    """A model of `gpu_zoo`."""
    def make(device: str, layers: int | None) -> Made:
        spec = gpu_zoo.MODELS[name]
        torch.manual_seed(0)
        with torch.device(device):
            model = spec.make(False, layers).train(train)
        if spec.channels_last:
            model = model.to(memory_format=torch.channels_last)
        inputs = {k: v.to(memory_format=torch.channels_last) if spec.channels_last and v.dim() == 4 else v for k, v in spec.inputs(device).items()}
        of = spec.loss if train else spec.output

        def step(**inputs):
            with torch.autocast(device, torch.bfloat16):
                return of(model, inputs)
        return Made(step, (), inputs, train)
    return Case(make)


def decode(device: str, layers: int | None) -> Made:
    return Made(*gpu_graphs.built(gpu_graphs.CASES["llama_1b_decode"], device, torch.bfloat16, layers))


def small(name: str) -> Case:
    """A training step of `tests/models/zoo.py`, at two layers."""
    def make(device: str, layers: int | None) -> Made:
        from tests.models.zoo import STEPS as models, Size
        size = Size(4, layers or 2, 256, 128, 4096, 128, 0.5, 0.34)
        model, inputs = models[name].build(size).to(device), models[name].inputs(size)

        def step(**inputs):
            return model(**inputs).loss
        return Made(step, (), {k: v.to(device) for k, v in inputs.items()}, True)
    return Case(make)


def examples() -> dict[str, Case]:
    """The programs that `examples/demo.py` shows."""
    sys.path.insert(0, str(EXAMPLES))
    from programs import EXAMPLES as found

    def make(example, device: str, layers: int | None) -> Made:
        torch.manual_seed(0)
        fn, args = example.make()
        fn = fn.to(device) if isinstance(fn, torch.nn.Module) else fn
        return Made(fn, tuple(a.to(device).requires_grad_(example.backward) for a in args), train=example.backward)
    return {e.name: Case(partial(make, e)) for e in found}


CASES = {
    "cuda": {f"{name} {mode}": zoo(name, mode == "train") for mode in ("infer", "train") for name in
             ("bert_large_32x128", "gpt2_medium_8x512", "resnet50_128_nhwc")}
    | {"llama_1b decode": Case(decode), "llama_1b decode, CUDA graphs": Case(decode, {"cudagraphs": True}),
       "llama_1b_4x1024 infer": zoo("llama_1b_4x1024", False)},
    "cpu": {**examples(), **{f"{name} train": small(name) for name in ("bert", "gpt2", "resnet50")}},
}
