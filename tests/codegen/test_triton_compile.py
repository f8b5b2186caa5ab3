"""The whole Triton vocabulary becomes machine code for NVIDIA and AMD, without a GPU: a few kernels that hold many operations each."""
import pytest

from tests.codegen import test_triton_ops as rows
from tests.codegen.test_c_ops import TYPES
from tests.codegen.triton_harness import load
from tokamak.codegen import triton_ops
from tokamak.ir.dtype import ALL, BOOL, I64
from tokamak.ir.ops import MONOIDS, OPS, can_fail

triton = pytest.importorskip("triton")
compiler = pytest.importorskip("triton.compiler")
targets = pytest.importorskip("triton.backends.compiler")

TARGETS = {"sm_90": (("cuda", 90, 32), "ptx"), "sm_100": (("cuda", 100, 32), "ptx"), "gfx942": (("hip", "gfx942", 64), "amdgcn")}


def operations_kernel(d, turned: bool = False) -> tuple[str, dict[str, str]]:
    """(text, signature) of one kernel with every operation on `d`, and every cast of a `d`; `turned`: with those of two and more, on a row and a
    column."""
    pointers, lines = {"p0": triton_ops.pointer_type(d), "p1": triton_ops.pointer_type(d), "c": "*i1"}, []
    convert = ".to(tl.int1)" if d is BOOL else ""
    row, column = ("tl.arange(0, 64)[None, :]", "tl.arange(0, 2)[:, None]") if turned else ("at", "at")
    lines = [f"a = tl.load(p0 + {row}){convert}", f"b = tl.load(p1 + {column}){convert}", "m = tl.load(c + at).to(tl.int1)"]
    out = []
    for info in OPS.values() if not d.is_half else ():
        if d not in (t for kind in info.takes for t in TYPES[kind]) or turned and info.arity == 1:
            continue
        args = ("m", "a", "b") if info.name == "where" else ("a", "b")[:info.arity]
        checked = can_fail(info.name, d)
        text = triton_ops.division(info.name, d, "a", "b", "m", "err", 1) if checked else triton_ops.op(info.name, d, args)
        out.append((BOOL if info.result == "bool" else d, text))
    out += [(t, triton_ops.cast(t, d, "a")) for t in ALL if not turned]
    lines += [f"tl.store(o_{t} + {128 * k} + at, {text})" for k, (t, text) in enumerate(out)]
    pointers |= {f"o_{t}": triton_ops.pointer_type(t) for t in ALL} | {"err": "*i32"}
    at = "tl.arange(0, 64)[None, :] + 64 * tl.arange(0, 2)[:, None]" if turned else "tl.arange(0, 128)"
    name = f"{'turned' if turned else 'all'}_{d}"
    return f"@triton.jit\ndef {name}({', '.join(pointers)}):\n    at = {at}\n    " + "\n    ".join(lines) + "\n\n\n", pointers


def fold_signature(monoid: str, d) -> dict[str, str]:
    kinds = [d, I64][:MONOIDS[monoid]]
    return {"p": triton_ops.pointer_type(d)} | {f"{n}{k}p": triton_ops.pointer_type(t) for n in "rstcn" for k, t in enumerate(kinds)} | {
        "err": "*i32", "n": "i32"}


@pytest.mark.parametrize("name", TARGETS)
def test_everything_compiles(name, tmp_path):
    kernels = {f"all_{d}": operations_kernel(d) for d in ALL} | {f"turned_{d}": operations_kernel(d, True) for d in ALL if not d.is_half}
    kernels |= {f"{m}_{d}": (rows.fold_kernel(m, d), fold_signature(m, d)) for m, d in rows.FOLDS if d.bytes in (1, 4)}
    kernels |= {k: (text, {"p0": "*i64", "p1": "*i64", "out": "*fp32", "err": "*i32", "n": "i32"})
                for k, text in zip(rows.RANDOM_KERNELS, rows.RANDOM_TEXT.split("\n\n\n"))}
    module = load("\n\n\n".join(text.rstrip() for text, _ in kernels.values()) + "\n", tmp_path)
    target, assembly = TARGETS[name]
    for kernel, (_, signature) in kernels.items():
        made = compiler.compile(compiler.ASTSource(getattr(module, kernel), signature, {}), target=targets.GPUTarget(*target))
        assert kernel in made.asm[assembly]


def test_tiles_of_one_element_stand_in_for_rows(tmp_path):
    """The rest of a row beside its blocks may be a single element, of 16 bits too: there are no two for a register."""
    text = """@triton.jit
def one(p, q):
    at = tl.arange(0, 1)
    tl.store(q + at, tk.again(tk.packed(tl.load(p + at))))
"""
    module = load(text, tmp_path)
    for kind in ("fp16", "fp32"):
        made = compiler.compile(compiler.ASTSource(module.one, {"p": f"*{kind}", "q": f"*{kind}"}, {}), target=targets.GPUTarget("cuda", 90, 32))
        assert "one" in made.asm["ptx"]


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_choices_are_rounded_in_pairs(name, half, tmp_path):
    """LLVM would round each side of a choice by itself, one element after the other."""
    text = f"""@triton.jit
def masked(p, q):
    at = tl.arange(0, 512)
    x = tl.load(p + at)
    tl.store(q + at, tk.in_pairs(tl.where(x <= 0.5, 0.0, x), tl.{half}))
"""
    target, assembly = TARGETS[name]
    short = {"bfloat16": "bf16", "float16": "fp16"}[half]
    made = compiler.compile(compiler.ASTSource(load(text, tmp_path).masked, {"p": "*fp32", "q": f"*{short}"}, {}), target=targets.GPUTarget(*target))
    if assembly == "ptx":
        kind = short.replace("fp", "f")
        assert f"cvt.rn.{kind}x2.f32" in made.asm["ptx"] and f"cvt.rn.{kind}.f32" not in made.asm["ptx"]
