"""Lines of Triton that lowering to tiles writes: the vocabulary of `triton_ops`, and what needs more than one expression."""
from __future__ import annotations

from ..ir.dtype import BOOL, F32, DType, compute_type
from ..ir.ops import CARRIERS, identity
from .triton_ops import cast, combine, full, literal, op, ordered_scan, pointer_type, random, reduce, scan, step, sums, triton_type, uniform_run

__all__ = ["LEAVES_FIRST", "cast", "combine_lines", "full", "literal", "moments_of", "number", "neutral", "plain", "op", "ordered_scan",
           "pointer_type", "random", "reduce", "scan", "step", "sums", "triton_type", "uniform_run", "update", "update_in_order"]


LEAVES_FIRST = ", eviction_policy='evict_first'"         # of a load: its line leaves the cache before others


def neutral(monoid: str, d: DType, component: int, narrow: bool = False):
    """The number that changes nothing when it is combined in; the index of an argmax or argmin is greater than any (`narrow`: of i32)."""
    if monoid in CARRIERS:
        return CARRIERS[monoid][component]
    return (2**31 - 1 if narrow else 2**63 - 1) if component else identity(monoid, d)


def plain(value: float) -> str:
    """Python text of a number that any floating type holds."""
    return repr(value) if abs(value) != float("inf") else f'float("{value}")'


def number(name: str, d: DType) -> str:
    """A parameter (f64 for floating numbers, i64 for others) as `d`."""
    if d.is_half:
        return cast(d, F32, f"{name}.to(tl.float32)")
    return f"{name} != 0" if d is BOOL else f"{name}.to({triton_type(d)})"


def combine_lines(monoid: str, made: tuple, a: tuple, b: tuple, later: bool = False) -> list[str]:
    """made = a (+) b, component by component. `later`: the indices of b are greater than those of a."""
    texts = combine(monoid, a, b, later)
    return [f"{', '.join(made)} = {', '.join(texts)}"]


def moments_of(carried: tuple, taken: list[tuple[str, str]], names: list[str]) -> list[str]:
    """Lines that take several (element, weight) a lane into the moments `carried`; a weight is '1.0', or 0 where the element is 0. `names`: four
    fresh registers."""
    total, mean, squares, count = names
    full, weights = all(w == "1.0" for _, w in taken), [w for _, w in taken]
    each = f"{total} * {1 / len(taken)!r}" if full else f"{total} * (1.0 / tl.maximum({count}, 1.0))"
    apart = " + ".join(f"({x} - {mean}) * ({x} - {mean})" + ("" if full else f" * {w}") for x, w in taken)
    both = f"tk.moments_more({', '.join(carried)}, {total}, {squares}, {float(len(taken)) if full else count})"
    return [f"{total} = {' + '.join(x for x, _ in taken)}", *([] if full else [f"{count} = {' + '.join(weights)}"]), f"{mean} = {each}",
            f"{squares} = {apart}", f"{', '.join(carried)} = {both}"]


def update(monoid: str, memory: str, offset: str, value: str, mask: str) -> str:
    """memory[offset] combined with `value` where `mask` ('' is everywhere) holds, whatever other programs update it: see `fuse.gpu.atomic`."""
    target = f"{memory} + {offset}" if offset != "0" else memory
    where = f", mask={mask}" if mask else ""
    if monoid == "last":
        return f"tl.store({target}, {value}{where})"
    if monoid in ("any", "all"):         # all that write, write the same
        said = value if monoid == "any" else f"(~{value})"
        return f"tl.store({target}, {monoid == 'any'}, mask={f'{mask} & {said}' if mask else said})"
    if monoid == "sum":
        return f"tl.atomic_add({target}, {value}{where}, sem='relaxed')"
    if monoid == "prod" and mask:
        target = f"{memory} + tl.where({mask}, {offset}, 0)"
    return f"tk.update_{monoid}({target}, {value}, {mask or 'tl.full([], True, tl.int1)'})"


def update_in_order(monoid: str, d: DType, target: str, value: str, mask: str, names: tuple[str, str]) -> list[str]:
    """Lines for memory[target] combined with `value`, after what this program has updated before; no other program does. `names`: fresh registers."""
    where = f", mask={mask}" if mask else ""
    lines = ["tl.debug_barrier()"]
    if monoid != "last":
        carried, (old, new) = compute_type(d), names
        both = cast(carried, d, old), cast(carried, d, value)
        lines += [f"{old} = tl.load({target}{where})", f"{new} = {cast(d, carried, combine(monoid, both[:1], both[1:])[0])}"]
        value = new
    return [*lines, f"tl.store({target}, {value}{where})"]
