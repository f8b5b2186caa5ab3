"""Compiles one-operation kernels from the C vocabulary and runs them on arrays: what the tests of the vocabulary are made of."""
from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np

from tokamak.codegen.c_prelude import fragments_in, prelude
from tokamak.ir.dtype import DType

FLAGS = "-O2 -march=native -fPIC -shared -fwrapv -fno-math-errno -fno-trapping-math -ffp-contract=fast -fno-strict-aliasing -w".split()


def build(body: str, folder: Path, lanes: int, flags: list[str] = FLAGS, compiler: tuple[str, ...] = ("gcc",)) -> ctypes.CDLL:
    """The library of C text `body` behind the fragments it mentions."""
    source, library = folder / f"k{lanes}.c", folder / f"k{lanes}.so"
    source.write_text(prelude(fragments_in(body, lanes), lanes) + body)
    done = subprocess.run([*compiler, *flags, "-o", str(library), str(source), "-lm"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]
    return ctypes.CDLL(str(library))


def elementwise(name: str, takes: list[DType], gives: DType, text: str) -> str:
    """A C function `name(n, error, a, b, ..., out)` that computes `text` of registers x0, x1, ... over n elements;
    `active` masks the lanes that count."""
    pointers = "".join(f", const {d.c} *a{k}" for k, d in enumerate(takes))
    full = " ".join(f"{_register(d)} x{k} = load_{d}(a{k} + i);" for k, d in enumerate(takes))
    part = " ".join(f"{_register(d)} x{k} = loadn_{d}(a{k} + i, n - i);" for k, d in enumerate(takes))
    return f"""
void {name}(int64_t n, int64_t *error{pointers}, {gives.c} *out) {{
  int64_t i = 0;
  for (; i + W <= n; i += W) {{ v_bool active = lanes_below(W); {full} store_{gives}(out + i, {text}); }}
  if (i < n) {{ v_bool active = lanes_below(n - i); {part} storen_{gives}(out + i, {text}, n - i); }} }}
"""


def _register(d: DType) -> str:
    return "v_f32" if d.is_half else f"v_{d}"


def call(library: ctypes.CDLL, name: str, arrays: list[np.ndarray], gives: DType) -> tuple[np.ndarray, int]:
    """Runs an `elementwise` function on equally long 1-d arrays (storage form: bf16 as uint16); the result and the error word."""
    out = np.empty(len(arrays[0]), {"bf16": "uint16"}.get(gives.name, gives.numpy))
    error = ctypes.c_int64(0)
    pointers = [ctypes.c_void_p(np.ascontiguousarray(a).ctypes.data) for a in (*arrays, out)]
    getattr(library, name)(ctypes.c_int64(len(out)), ctypes.byref(error), *pointers)
    return out, error.value
