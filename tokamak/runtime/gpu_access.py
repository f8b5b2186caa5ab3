"""What a warp's reads and writes touch at once, by a kernel's PTX: banks of shared memory, lines of global memory.

Nothing is run but the addresses' arithmetic, for the threads of one warp of the first program, in the first turn of its loops, and on its way through
the branches, as far as it is known: what threads differ by is the same in all of them. What 32 threads read or write at once of shared memory takes
one turn if no two of them want different words of one bank, and as many as want some otherwise: a tile that is copied there as it lies, and read
along its other side, takes up to 32 for one. Of global memory it takes one for each line of the first-level cache: neighbours of a row 1 to 4, one
element each of rows that lie apart 32.
"""
from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

LANES = 32              # threads of a warp, and banks
WORD = 4                # bytes of a bank
LINE = 128              # bytes that a warp reads or writes at once, and of a line of the cache
LABEL = ":"
PARAMETER = 1024        # of an integer parameter of which nothing is known; pointers are 0

Value = list[int] | None        # of each lane; None: not known

_LINE = re.compile(r"^[ \t]*(?:(\$\w+):|(?:@(!?)(%p\d+)\s+)?([a-z][\w.:]*)\s+([^;\n]*);)", re.M)
_REGISTER = re.compile(r"%[a-z]+\d+")
_ADDRESS = re.compile(r"\[\s*([%\w.$]+)\s*(?:\+\s*(-?\d+)\s*)?\]")
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")
_SHARED = re.compile(r"(?:ld|st)(?:\.volatile)?\.shared(?:\.v(\d))?\.[a-z]+(\d+)$")
_GLOBAL = re.compile(r"(?:ld|st)(?:\.volatile)?\.global(?:[.:]+\w+)*?(?:\.v(\d))?\.[a-z]+(\d+)$")
_COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global")
_KIND = re.compile(r"[sub]\d+|pred")
_COMPARED = {"eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
             "lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge}
_BITWISE = {"add": operator.add, "sub": operator.sub, "and": operator.and_, "or": operator.or_, "xor": operator.xor, "min": min, "max": max}


@dataclass(frozen=True, eq=False)
class _Instruction:
    """`guard`: (negated, predicate) or None. A label is one whose `op` is LABEL, with its name as operand."""
    op: str
    operands: tuple[str, ...]
    guard: tuple[bool, str] | None
    turns: bool             # it lies in a loop that has no other one inside


@dataclass(frozen=True)
class _Access:
    """`width` bytes a thread at `base`, a register or a name, and `offset` bytes behind it."""
    by: _Instruction
    base: str
    offset: int
    width: int


def contention(listing: str, threads: int) -> tuple[float, float]:
    """How many times as often as it has to a warp goes to the banks of shared memory, in all of the kernel's code and in innermost loops; 1 where it
    does not say."""
    accesses, known = _walked(listing, threads, {}, _shared)
    went, least = [0, 0], [0, 0]
    for a in accesses:
        taken, needed = _banks(a, known)
        for n in range(2 if a.by.turns else 1):
            went[n] += taken
            least[n] += needed
    return tuple(w / m if m else 1.0 for w, m in zip(went, least))


def lines(listing: str, threads: int, values: Sequence[int]) -> tuple[int, int]:
    """Lines of the cache, of each access apart, that a warp reads and writes of global memory: in all of the kernel's code, and in one turn of its
    innermost loops. `values`: of its parameters, in order; 0 for pointers. What is read twice at the same place counts once."""
    accesses, known = _walked(listing, threads, dict(enumerate(values)), _global)
    whole = again = 0
    for a in {(a.by.op, a.base, a.offset, a.by.guard): a for a in accesses}.values():
        at, lanes = _read(a.base, known), _lanes(a, known)
        count = len({(at[n] + a.offset + b) // LINE for n in lanes for b in (0, a.width - 1)} if at else range(-(-len(lanes) * a.width // LINE)))
        whole += count
        again += count if a.by.turns else 0
    return whole, again


def _shared(i: _Instruction) -> _Access | None:
    m = _SHARED.match(i.op)
    return _access(i, 0, int(m[1] or 1) * int(m[2]) // 8) if m else None


def _global(i: _Instruction) -> _Access | None:
    if m := _GLOBAL.match(i.op):
        return _access(i, 0, int(m[1] or 1) * int(m[2]) // 8)
    return _access(i, 1, int(i.operands[2], 0)) if _COPY.match(i.op) and len(i.operands) > 2 and i.operands[2].isalnum() else None


def _banks(a: _Access, known: Mapping[str, Value]) -> tuple[int, int]:
    """How often a warp goes to the banks for what each of its threads reads or writes, and how often it has to."""
    at, lanes = _read(a.base, known), _lanes(a, known)
    together = min(LANES, LINE // max(a.width, WORD))           # threads that are served at once
    groups = [[n for n in lanes if n // together == g] for g in range(LANES // together)]
    least = sum(map(bool, groups))
    if at is None:
        return least, least
    taken = 0
    for group in groups:
        banks: dict[int, int] = {}
        for w in {(at[n] + a.offset + b) // WORD for n in group for b in range(0, a.width, WORD)}:
            banks[w % LANES] = banks.get(w % LANES, 0) + 1
        taken += max(banks.values(), default=0)
    return taken, least


def _lanes(a: _Access, known: Mapping[str, Value]) -> list[int]:
    """The threads that take part."""
    guard = known.get(a.by.guard[1]) if a.by.guard else None
    return [n for n in range(LANES) if guard is None or bool(guard[n]) != a.by.guard[0]]


# -- reading -------------------------------------------------------------------------------------------------------------------
def _instructions(listing: str) -> Iterator[_Instruction]:
    """Those of the listing and its labels, in order."""
    found = list(_LINE.finditer(listing))
    labels = {m[1]: n for n, m in enumerate(found) if m[1]}
    back = [(labels[to], n) for n, m in enumerate(found) if m[4] and m[4].startswith("bra") and labels.get(to := m[5].strip(), n) < n]
    inner = [x for x in back if not any(x != y and x[0] <= y[0] and y[1] <= x[1] for y in back)]
    for n, m in enumerate(found):
        if m[1]:
            yield _Instruction(LABEL, (m[1],), None, False)
        else:
            guard = (bool(m[2]), m[3]) if m[3] else None
            yield _Instruction(m[4], tuple(o.strip() for o in _OPERAND.findall(m[5])), guard, any(first <= n <= last for first, last in inner))


def _access(i: _Instruction, which: int, width: int) -> _Access | None:
    """What the instruction reads or writes at the address among its operands that is the `which`-th."""
    found = [m for o in i.operands if (m := _ADDRESS.match(o))]
    return _Access(i, found[which][1], int(found[which][2] or 0), width) if len(found) > which else None


def _read(operand: str, known: Mapping[str, Value]) -> Value:
    if operand.startswith("%"):
        return known.get(operand)
    try:
        return [int(operand, 0)] * LANES
    except ValueError:
        return [0] * LANES if re.fullmatch(r"[a-zA-Z_]\w*", operand) else None          # where shared memory begins


# -- arithmetic ----------------------------------------------------------------------------------------------------------------
def _walked(listing: str, threads: int, values: Mapping[int, int],
            accessed: Callable[[_Instruction], _Access | None]) -> tuple[list[_Access], dict[str, Value]]:
    """What is `accessed` on the way through the code, and what the registers hold that addresses and guards are made of, each as it is first written
    there. `values`: of parameters, by their numbers. Branches back are not taken, nor those that some threads do not take or nothing is known of."""
    code = list(_instructions(listing))
    found = {i: a for i in code if (a := accessed(i)) is not None}
    if not found:
        return [], {}
    made: dict[str, list[_Instruction]] = {}
    for i in code:
        if i.operands and _REGISTER.fullmatch(i.operands[0]):
            made.setdefault(i.operands[0], []).append(i)
    wanted = [a.base for a in found.values()] + [i.guard[1] for i in code if i.guard and (i in found or i.op.startswith("bra"))]
    needed: set[str] = set()
    while wanted:
        register = wanted.pop()
        if register in made and register not in needed:
            needed.add(register)
            wanted += [r for i in made[register] for o in i.operands[1:] for r in _REGISTER.findall(o)]
    known: dict[str, Value] = {"%tid.x": list(range(LANES)), "%laneid": list(range(LANES)), "%ntid.x": [threads] * LANES}
    known |= dict.fromkeys(("%ctaid.x", "%ctaid.y", "%ctaid.z", "%tid.y", "%tid.z", "%warpid", "%cluster_ctarank", "%cluster_ctaid.x"), [0] * LANES)
    labels, met, to, accesses = {i.operands[0] for i in code if i.op == LABEL}, set(), "", []
    for i in code:
        if i.op == LABEL:
            met.add(i.operands[0])
            to = "" if to == i.operands[0] else to
        elif to:
            continue
        elif i.op.startswith("bra") and i.operands[0] in labels - met:
            guard = known.get(i.guard[1]) if i.guard else [1] * LANES
            to = i.operands[0] if guard and all(bool(g) != bool(i.guard and i.guard[0]) for g in guard) else ""
        elif i in found:
            accesses.append(found[i])
        elif i.operands and i.operands[0] in needed and i.operands[0] not in known:
            known[i.operands[0]] = _parameter(i, values) if i.op.startswith("ld.param") else _value(i, known)
    return accesses, known


def _parameter(i: _Instruction, values: Mapping[int, int]) -> Value:
    found = re.search(r"_param_(\d+)", i.operands[1])
    usual = 0 if i.op.endswith("64") else PARAMETER
    return [values.get(int(found[1]), usual) if found else usual] * LANES


def _value(i: _Instruction, known: Mapping[str, Value]) -> Value:
    """What an instruction makes in each lane; None where it is none of integers, or of something that is not known."""
    name, *words = i.op.split(".")
    kind = words[-1] if words else ""
    found = [_read(o, known) for o in i.operands[1:]]
    if not found or any(v is None for v in found) or not _KIND.fullmatch(kind) or any("{" in o for o in i.operands):
        return None
    make = _made(name, words, kind)
    if make is None:
        return None
    try:
        return [make(*v) for v in zip(*found)]
    except (ZeroDivisionError, TypeError, ValueError):
        return None


def _made(name: str, words: list[str], kind: str) -> Callable[..., int] | None:
    """The function of one lane's operands that an instruction is; None where it is not known."""
    bits, unsigned = 1 if kind == "pred" else int(kind[1:]), kind[0] == "u"
    fit = (lambda x: x & 1) if kind == "pred" else _wrapped(bits)
    plain = (lambda x: x & (1 << bits) - 1) if unsigned else fit
    if name in ("mov", "cvta"):
        return lambda x: x
    if name == "cvt":
        to = _KIND.fullmatch(words[-2]) if len(words) > 1 else None
        return (lambda x: _wrapped(int(to[0][1:]))(plain(x))) if to and to[0] != "pred" else None
    if name in _BITWISE:
        f = _BITWISE[name]
        return lambda x, y: fit(f(plain(x), plain(y)))
    if name in ("mul", "mad"):
        if "hi" in words:
            return (lambda x, y: fit(plain(x) * plain(y) >> bits)) if name == "mul" else lambda x, y, z: fit((plain(x) * plain(y) >> bits) + z)
        whole = _wrapped(2 * bits) if "wide" in words else fit
        return (lambda x, y: whole(plain(x) * plain(y))) if name == "mul" else lambda x, y, z: whole(plain(x) * plain(y) + z)
    if name == "shl":
        return lambda x, y: fit(x << y) if 0 <= y < bits else 0
    if name == "shr":
        return lambda x, y: fit((plain(x) if unsigned else x) >> min(max(y, 0), 63))
    if name in ("div", "rem"):
        def divided(x: int, y: int) -> int:
            x, y = plain(x), plain(y)
            whole = abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)
            return fit(whole if name == "div" else x - whole * y)
        return divided
    if name == "not":
        return lambda x: fit(~x)
    if name == "neg":
        return lambda x: fit(-x)
    if name == "selp":
        return lambda x, y, p: x if p else y
    if name == "setp" and words[0] in _COMPARED and len(words) == 2:
        compare = _COMPARED[words[0]]
        return lambda x, y: int(compare(plain(x), plain(y)))
    if name == "bfe":
        return lambda x, at, n: _field(x, at, n, unsigned)
    if name == "bfi":
        return lambda x, into, at, n: fit(into & ~(_mask(n) << (at & 255)) | (x & _mask(n)) << (at & 255))
    if name == "lop3":
        return lambda x, y, z, table: fit(sum((_BIT[n][0] ^ x) & (_BIT[n][1] ^ y) & (_BIT[n][2] ^ z) for n in range(8) if table >> n & 1))
    return None


_BIT = [tuple(0 if n >> k & 1 else -1 for k in (2, 1, 0)) for n in range(8)]      # of lop3's n-th case: what turns a bit that it wants into 1


def _wrapped(bits: int) -> Callable[[int], int]:
    return lambda x: ((x + (1 << bits - 1)) & (1 << bits) - 1) - (1 << bits - 1)


def _mask(n: int) -> int:
    return (1 << (n & 255)) - 1         # of lengths and places the lowest eight bits count


def _field(x: int, at: int, n: int, unsigned: bool) -> int:
    mask = _mask(n)
    cut = x >> (at & 255) & mask
    return cut if unsigned or not cut > mask >> 1 else cut - mask - 1
