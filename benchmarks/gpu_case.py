"""The GPU cases, by name: `FAMILY[_bwd|_step]_DTYPE_SIZES` stands for a function of tensors and their shapes, at any size.

`layernorm_bwd_bf16_65536x1024` is the backward pass of LayerNorm over 65,536 rows of 1,024, `layernorm_step_bf16_65536x1024` both passes. Sizes are
numbers joined by x, with Ki and Mi; those left out have defaults; some families take a layout before them (`batchnorm_bf16_nhwc`). The functions are
written as users write them.

The fewest bytes: forward, each input read once and each output written once; backward, the streams (activations) that the forward read, the incoming
gradient, and the streams' gradients, each once (weights and their gradients are small and are left out); a step, the sum of both.
"""
from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch.utils._pytree import tree_leaves

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "tf32": torch.float32, "f64": torch.float64}
LAYOUTS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last, "ncdhw": torch.contiguous_format, "ndhwc": torch.channels_last_3d}
BACKWARD_GROUPS = {"pointwise": "pointwise-bwd", "overhead": "pointwise-bwd", "norm": "norm-bwd", "reduction": "reduction-bwd",
                   "attention": "attention-bwd"}
MODES = {"": "forward", "_bwd": "backward", "_step": "step"}
SMALL = 1 << 20                 # a pointwise case of fewer bytes than this measures the overhead of a call
NAME = re.compile(r"(?P<family>[a-z]\w*?)(?P<mode>_bwd|_step)?_(?P<dtype>f16|bf16|f32|tf32|f64)(_(?P<layout>nchw|nhwc|ncdhw|ndhwc))?"
                  r"(_(?P<sizes>\d+(x\d+)*(Ki|Mi)?))?$")


@dataclass(frozen=True)
class Spec:
    """A tensor. `role`: 'stream' (activation), 'weight' (parameter), 'buffer' (state that calls change) or 'index' (integers from `least` to below
    `below`: places, or a weight in few bits).
    Values are normal: `mean` plus `scale` times a standard normal."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    role: str = "stream"
    scale: float = 1.0
    mean: float = 0.0
    below: int = 0
    least: int = 0
    layout: torch.memory_format = torch.contiguous_format

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def make(self, generator: torch.Generator, grad: bool = False) -> torch.Tensor:
        """A tensor of random values on the generator's device, which requires gradients where `grad` says so."""
        if self.role == "index":
            return torch.randint(self.least, self.below, self.shape, dtype=self.dtype, device=generator.device, generator=generator)
        values = torch.randn(self.shape, dtype=self.dtype, device=generator.device, generator=generator)
        values = (values * self.scale + self.mean).contiguous(memory_format=self.layout)
        return values.requires_grad_(grad)


@dataclass(frozen=True)
class Recipe:
    """What a family makes of sizes. `flops`: of the contractions in the forward pass; the backward pass takes `ratio` times as many. `saved`: how
    many of the streams the backward pass has to read again (None: all). `steady`: the same function without random numbers, for the comparison;
    `dropped`: the share of the first stream that the function itself sets to zero."""
    fn: Callable
    specs: tuple[Spec, ...]
    flops: int = 0
    ratio: float = 2.0
    saved: int | None = None
    steady: Callable | None = None
    dropped: float = 0.0


@dataclass(frozen=True)
class Family:
    group: str
    build: Callable                 # (dtype, *sizes) -> Recipe; its defaults are the sizes that a name may leave out
    images: bool = False            # takes a layout


@dataclass(frozen=True)
class Case:
    """A function and its inputs. `mode`: 'forward', 'backward' or 'step', which is both. `sizes`: all of them, defaults included. `tf32`: the user
    has allowed that products of float32 round their factors to TF32."""
    name: str
    family: str
    group: str
    mode: str
    dtype: torch.dtype
    sizes: tuple[int, ...]
    recipe: Recipe
    tf32: bool = False

    @property
    def fn(self) -> Callable:
        return self.recipe.fn

    @property
    def specs(self) -> tuple[Spec, ...]:
        return self.recipe.specs

    @cached_property
    def bytes(self) -> int:
        """The fewest that any implementation moves."""
        inputs = sum(s.bytes for s in self.specs)
        outputs = [torch.empty_strided(s.shape, strides(s), dtype=s.dtype, device="meta") for s in self.specs]
        out = sum(t.numel() * t.element_size() for t in tree_leaves(self.fn(*outputs)))
        streams = [s.bytes for s in self.specs if s.role == "stream"]
        indices = sum(s.bytes for s in self.specs if s.role == "index")
        back = sum(streams[:self.recipe.saved]) + indices + out + sum(streams)
        return {"forward": inputs + out, "backward": back, "step": inputs + out + back}[self.mode]

    @property
    def flops(self) -> float:
        return self.recipe.flops * {"forward": 1, "backward": self.recipe.ratio, "step": 1 + self.recipe.ratio}[self.mode]

    def limit(self, copy: float, matmul: float) -> float:
        """Seconds that no implementation beats, at `copy` bytes a second and `matmul` FLOPs a second."""
        return max(self.bytes / copy, self.flops / matmul * (2 if self.tf32 else 1))

    def inputs(self, device: str, seed: int = 0) -> list[torch.Tensor]:
        generator = torch.Generator(device).manual_seed(seed)
        return [s.make(generator, self.differentiates(s)) for s in self.specs]

    def differentiates(self, spec: Spec) -> bool:
        """Whether the case takes the gradient of that input."""
        return self.mode != "forward" and spec.dtype.is_floating_point and spec.role != "buffer"


FAMILIES: dict[str, Family] = {}


def family(name: str, group: str, images: bool = False):
    """Enters a function (dtype, sizes...) -> Recipe as the family `name`."""
    def enter(build):
        FAMILIES[name] = Family(group, build, images)
        return build
    return enter


def parse(name: str) -> Case:
    """The case of that name. Raises ValueError for a name that says none."""
    found = NAME.match(name)
    if found is None or found["family"] not in FAMILIES:
        raise ValueError(f"there is no case '{name}': a name is FAMILY[_bwd|_step]_DTYPE[_LAYOUT]_SIZES; families: {', '.join(FAMILIES)}")
    sizes = [_number(t) for t in (found["sizes"] or "").split("x") if t]
    made = FAMILIES[found["family"]]
    if bool(found["layout"]) != made.images:
        raise ValueError(f"'{name}': " + ("give a layout, nchw or nhwc" if made.images else f"{found['family']} takes no layout"))
    return build(name, found["family"], MODES[found["mode"] or ""], DTYPES[found["dtype"]], sizes, LAYOUTS[found["layout"] or "nchw"],
                 found["dtype"] == "tf32")


def build(name: str, family: str, mode: str, dtype: torch.dtype, sizes, layout=torch.contiguous_format, tf32: bool = False) -> Case:
    """A case of a family at these sizes; ValueError when their number is wrong."""
    made = FAMILIES[family]
    how = {"layout": layout} if made.images else {}
    try:
        bound = inspect.signature(made.build).bind(dtype, *sizes, **how)
    except TypeError as error:
        raise ValueError(f"'{name}': sizes {sizes}: {error}") from None
    bound.apply_defaults()
    recipe = made.build(*bound.args, **bound.kwargs)
    group = made.group
    if group == "pointwise" and sum(s.bytes for s in recipe.specs) < SMALL:
        group = "overhead"
    return Case(name, family, _grouped(group, mode), mode, dtype,
                tuple(a for a in bound.args[1:] if isinstance(a, int)), recipe, tf32)


def _grouped(group: str, mode: str) -> str:
    return group if mode == "forward" else BACKWARD_GROUPS.get(group, group) if mode == "backward" else f"{group}-step"


def shrunk(case: Case, most: int = 32) -> Case:
    """The same at sizes of at most `most`, each halved until it fits and as odd as it was."""
    def small(n: int) -> int:
        m = n
        while m > most:
            m //= 2
        return m | 1 if n % 2 and n > most else m
    layout = next((s.layout for s in case.specs if s.layout != torch.contiguous_format), torch.contiguous_format)
    return build(case.name, case.family, case.mode, case.dtype, [small(n) for n in case.sizes], layout, case.tf32)


def _number(text: str) -> int:
    for suffix, factor in (("Ki", 1 << 10), ("Mi", 1 << 20)):
        if text.endswith(suffix):
            return int(text.removesuffix(suffix)) * factor
    return int(text)


def strides(spec: Spec) -> tuple[int, ...]:
    """Strides of a tensor of that shape and layout."""
    return torch.empty(spec.shape, device="meta").contiguous(memory_format=spec.layout).stride()


# -- what families are made of ---------------------------------------------------------------------------------------------
def stream(dtype, *shape, **more) -> Spec:
    return Spec(shape, dtype, **more)


def weight(dtype, *shape, **more) -> Spec:
    """A parameter; by default around one, as a norm's is."""
    return Spec(shape, dtype, "weight", **{"scale": 0.1, "mean": 1.0, **more})


def bias(dtype, *shape) -> Spec:
    return Spec(shape, dtype, "weight", scale=0.1)


def matrix(dtype, out: int, inner: int) -> Spec:
    """A linear layer's weight, scaled so that outputs are about as large as inputs."""
    return Spec((out, inner), dtype, "weight", scale=inner ** -0.5)


def index(below: int, *shape) -> Spec:
    return Spec(shape, torch.int64, "index", below=below)


def coded(dtype, *shape) -> Spec:
    """Integers of every value that `dtype` has: a weight in few bits."""
    return Spec(shape, dtype, "index", least=torch.iinfo(dtype).min, below=torch.iinfo(dtype).max + 1)


def over(case: Case, **changes) -> Case:
    """The case with another recipe."""
    return replace(case, recipe=replace(case.recipe, **changes))
