"""Loops as C text: around registers or elements, in blocks after which f32 sums move into f64, through tiles.

A vector loop is printed for whole registers and for the ragged end, in which `n` lanes count. A loop that only folds carries each fold in CHAINS
accumulators, which meet in pairs behind it: an addition waits for the one before it three or four cycles. Where a loop's result goes around the
caches, the ragged piece runs first as well, up to the first whole line of the result.
"""
from __future__ import annotations

from ..ir.dtype import F32
from ..ir.index import Axis
from ..ir.ops import OPS
from .c_memory import register
from .kernel import BLOCK, ROWS, Accumulator, Fold, Let, Loop, Prefix, Refill, Tile, Write

CHAINS = 2              # accumulators of a fold. 1, 2, 4: LayerNorm of 1024 columns 4.9, 4.5, 4.4 ms; sums of such rows 2.9, 3.1, 3.2
LINES = 16              # registers in a loop from which its lines are worth looking at one by one
SHORT = 10              # statements of a loop that waits for its folds: longer ones have other work to do meanwhile


class Loops:
    """The printer's part for loops. The printer has `k`, `index`, `_block`, `_pointer`, `combine`, `_neutral`."""

    def _loop(self, loop: Loop) -> list[str]:
        v, low, high = self.k.axes[loop.axis], self.index(loop.low), self.index(loop.high)
        step = self.k.lanes if loop.vector else 1
        flush = [f"  {a.var}l += lower_half({a.var}); {a.var}h += upper_half({a.var}); {a.var} = (v_f32){{0}};" for a in loop.flush]
        if loop.piece:
            return [self._piece(v, low, high, loop.piece), *self._block(loop.items), *flush, "}"]
        if loop.tiles:
            return self._tiled_loop(loop, v, low, high)
        if loop.flush:
            part = f"tk_min(c{v} + {BLOCK * step}, {high})"
            inner = self._plain_loop(loop, v, f"c{v}", f"d{v}", step)
            head = f"for (int64_t c{v} = {low}; c{v} < {high}; c{v} += {BLOCK * step}) {{ const int64_t d{v} = {part};"
            return [head, *("  " + x for x in inner), *flush, "}"]
        return self._plain_loop(loop, v, low, high, step)

    @staticmethod
    def _piece(v: str, low: str, high: str, steps: int) -> str:
        return f"for (int64_t c{v} = {low}; c{v} < {high}; c{v} += {steps}) {{ const int64_t d{v} = tk_min(c{v} + {steps}, {high});"

    def _tiled_loop(self, loop: Loop, v: str, low: str, high: str) -> list[str]:
        """A loop around one vector loop, turned inside out: pieces of ROWS steps inside the vector loop, each with its tiles filled first. Each piece
        asks for the lines of the next into the second level: no prefetcher of the machine follows so many rows (4096x4096 25.6 -> 18.8 ms)."""
        inner = next(s for s in loop.items if isinstance(s, Loop))
        body = Loop(loop.axis, loop.low, loop.high, False, [x for s in loop.items for x in (s.items if s is inner else [s])])
        x, start, end = self.k.axes[inner.axis], self.index(inner.low), self.index(inner.high)
        rows = lambda: [y for t in loop.tiles for y in self._fill(t, loop.axis, v)] + self._plain_loop(body, v, f"c{v}", f"d{v}", 1)
        self.streaming, self.sweeping = "s@ && !((int64_t)(&p) & 63)", True
        out = [f"{t.dtype.c} {t.name}[{ROWS} * W] __attribute__((aligned(64)));" for t in loop.tiles]
        out += [f"for (int64_t c{v} = {low}; c{v} < {high}; c{v} += {ROWS}) {{ "
                f"const int64_t d{v} = tk_min(c{v} + {ROWS}, {high}); int64_t {x} = {start};",
                f"  for (; {x} + W <= {end}; {x} += W) {{", *("    " + y for y in rows()), "  }"]
        self.streaming, self.sweeping, self.tail = None, False, True
        out += [f"  if ({x} < {end}) {{ const int64_t n = {end} - {x};", *("    " + y for y in rows()), "  }", "}"]
        self.tail = False
        return out

    def _fill(self, t: Tile, axis: Axis, v: str) -> list[str]:
        self.renamed = {axis: f"c{v}"}
        p, step = self._pointer(t.memory, t.address), self.index(t.step)
        self.renamed = {}
        lanes, ctype = "n" if self.tail else "W", t.dtype.c
        out = [f"{{ const {ctype} *s = {p}; int64_t j = 0;"]
        if t.dtype.bytes in (4, 8) and not self.tail:
            reg = register(t.dtype)
            out += [f"  for (; j + W <= d{v} - c{v}; j += W) {{ {reg} r[W];",
                    "    for (int k = 0; k < W; k++) {",
                    f"      r[k] = load_{t.dtype}(s + k * {step} + j); __builtin_prefetch(s + (k + W) * {step} + j, 0, 2); }}",
                    f"    transpose_{t.dtype.bytes * 8}((void *)r);",
                    f"    for (int k = 0; k < W; k++) store_{t.dtype}({t.name} + (j + k) * W, r[k]); }}"]
        out.append(f"  for (int64_t k = 0; k < {lanes}; k++) for (int64_t i = j; i < d{v} - c{v}; i++) {t.name}[i * W + k] = s[k * {step} + i]; }}")
        return out

    def _plain_loop(self, loop: Loop, v: str, low: str, high: str, step: int) -> list[str]:
        if not loop.vector:
            chains = self._chains(loop, v, high, step)
            if not chains:
                return [f"for (int64_t {v} = {low}; {v} < {high}; {v}++) {{", *self._block(loop.items), "}"]
            rest = (f"for (; {v} < {high}; {v}++) {{", *self._block(loop.items), "}")
            return ["{", *("  " + x for x in (f"int64_t {v} = {low};", *chains, *rest)), "}"]
        streamed = [s for s in loop.items if isinstance(s, Write) and s.total is not None]
        if streamed:
            return self._streaming_loop(loop, v, low, high, step, streamed)
        out = [f"int64_t {v} = {low};", *self._chains(loop, v, high, step),
               f"for (; {v} + {step} <= {high}; {v} += {step}) {{", *self._block(loop.items), "}"]
        out += [f"if ({v} < {high}) {{ const int64_t n = {high} - {v};", *self._ragged(loop), "}"]
        return ["{", *("  " + x for x in out), "}"]

    def _ragged(self, loop: Loop) -> list[str]:
        self.tail = True
        out = self._block(loop.items)
        self.tail = False
        return out

    def _streaming_loop(self, loop: Loop, v: str, low: str, high: str, step: int, streamed: list[Write]) -> list[str]:
        """A vector loop whose large result goes around the caches in whole lines: lanes up to the start of its first line, registers, the rest."""
        self.renamed = {loop.axis: low}
        heads = [(s, self._pointer(s.memory, s.address)) for s in streamed]
        self.renamed = {}
        first, p = heads[0]
        names = [f"go{s.memory}" + (f"_{n}" if any(s.memory == t.memory for t in streamed[:n]) else "") for n, s in enumerate(streamed)]
        out = [f"const int long{v} = {high} - {low} >= {LINES * step};",
               f"int64_t {v} = {low}, n = s{first.memory} && long{v} ? tk_min((-(int64_t)({p}) & 63) / {first.dtype.bytes}, {high} - {low}) : 0;"]
        for name, (s, p) in zip(names, heads):      # half a line written around the cache and half through it costs more than all of it is worth
            whole = f"{v} + n + ({high} - {v} - n) / {64 // s.dtype.bytes} * {64 // s.dtype.bytes}"
            out.append(f"const int64_t {name} = s{s.memory} && long{v} && ((int64_t)({p} + n) & 63) == 0 ? {whole} : {low};")
        out += ["for (int last = 0;; last = 1) {",
                f"  for (; n > 0; n -= {step}) {{ const int64_t left = n; n = tk_min(n, {step}); {{", *("    " + x for x in self._ragged(loop)),
                f"  }} {v} += n; n = left; }}", "  if (last) break;"]
        self.streaming, self.lines = f"{v} < @", dict(zip(streamed, names))
        out += [f"  for (; {v} + {step} <= {high}; {v} += {step}) {{", *("  " + x for x in self._block(loop.items)), "  }", f"  n = {high} - {v}; }}"]
        self.streaming = self.lines = None
        return ["{", *("  " + x for x in out), "}"]

    # -- folds in several accumulators ------------------------------------------------------------------------------------
    def _chains(self, loop: Loop, v: str, high: str, step: int) -> list[str]:
        """The part of a folding loop that runs CHAINS registers at a time."""
        folds = [s for s in loop.items if isinstance(s, Fold)]
        plain = not any(isinstance(s, Loop) or isinstance(s, Let) and OPS[s.op].heavy for s in loop.items)
        few = not loop.vector and loop.high.constant is not None
        if not folds or not plain or few or len(loop.items) > SHORT:
            return []
        if any(s.accumulator.monoid.startswith("arg") or s.masked is not loop.vector for s in folds):
            return []
        accumulators = [s.accumulator for s in folds]
        out = [" ".join(self._chain(a, k) for a in accumulators) for k in range(1, CHAINS)]
        out.append(f"for (; {v} + {CHAINS * step} <= {high}; {v} += {CHAINS * step}) {{")
        for k in range(CHAINS):
            self.renamed = {loop.axis: f"({v} + {k * step})" if k else v}
            self.chain = k
            out += ["  {", *("  " + x for x in self._block(loop.items)), "  }"]
        self.renamed, self.chain = {}, 0
        out.append("}")
        stride = CHAINS
        while stride > 1:
            stride //= 2
            for k in range(stride):
                out += [self._meet(a, k, k + stride) for a in accumulators]
        return out

    def _chain(self, a: Accumulator, k: int) -> str:
        """The declaration of a further accumulator."""
        return f"{register(a.dtype)} {self.chained(a, k)} = {self._neutral(a.monoid, a.dtype)};"

    @staticmethod
    def chained(a: Accumulator, k: int) -> str:
        return f"{a.var}_{k}" if k else a.var

    def _meet(self, a: Accumulator, k: int, other: int) -> str:
        x, y = self.chained(a, k), self.chained(a, other)
        if watched(a):
            return f"{x} = {WATCHED[a.monoid]}_{a.dtype}({y}, {x});"
        return f"{x} = {self.combine(a.monoid, a.dtype, x, y)};"


WATCHED = {"max": "top", "min": "low"}


def watched(a: Accumulator) -> bool:
    """Folds that carry a mask of the lanes in which they met a NaN."""
    return a.monoid in ("max", "min") and a.dtype.is_float


def loops_of(items):
    for s in items:
        if isinstance(s, Loop):
            yield s
        if isinstance(s, (Loop, Refill)):
            yield from loops_of(s.items)


def statements_of(items):
    for s in items:
        if isinstance(s, (Loop, Refill)):
            yield from statements_of(s.items)
        else:
            yield s


def wide_prefixes(items) -> dict[Accumulator, bool]:
    """What prefixes of f32 in `items` carry in f64 -> do they run along lanes? (Products along lanes are rounded by register.)"""
    return {s.accumulator: s.along for s in statements_of(items) if isinstance(s, Prefix) and s.accumulator.dtype is F32
            and (s.accumulator.monoid in ("sum", "logsumexp") or s.accumulator.monoid == "prod" and not s.along)}
