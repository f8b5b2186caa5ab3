"""Kernel -> C text. This printer decides nothing: statement in, text out.

A kernel becomes one exported function `int64_t NAME(const int64_t *w, int64_t threads)` and one static function a phase, which every thread runs:
it takes tickets until none is left, so any number of threads gives every share exactly once. The vector loop is printed twice, for whole
registers and for the ragged end, in which `n` lanes count.
"""
from __future__ import annotations

import re

from ..ir import ops
from ..ir.dtype import BOOL, DType
from ..ir.index import Axis, FloorDiv, Index, Max, Min, Mod
from .c_accumulate import Accumulators
from .c_loop import Loops, loops_of, statements_of, wide_prefixes
from .c_memory import number, register
from .c_ops import COMPARE, c_op
from .c_partial import Partials, folds_columns, kept_type, stored_type
from .c_prelude import fragments_in, pieces
from .c_streams import STREAMS, in_step, reads_rows, rows_in_step
from .kernel import (AHEAD, FAR, FAR_FROM, Accumulator, Convert, Divisor, Fetch, IndexValue, Kernel, LaneCompare, LaneDivide, Let, Loop, Phase,
                     Quotient, RandomValue, Read, Refill, Splat, Write)

TICKETS = 16            # shares of a kernel with partial results
NO_MEMORY = "((int64_t)1 << 62)"       # the error of a kernel that could not have its scratch memory
PARTIALS = 64           # arrays of partial results that a kernel may have

JOB = f"""\
typedef struct {{ const int64_t *w; int64_t tickets, next, error, copies; void *partial[{PARTIALS}]; }} tk_job;
extern void *aligned_alloc(unsigned long, unsigned long); extern void free(void *);
"""


def render(kernel: Kernel, name: str) -> tuple[tuple[str, ...], str]:
    """(prelude, text): the C text of `kernel` as function `name`, and the pieces of text that stand before it."""
    text = Printer(kernel, name).text()
    return (*pieces(fragments_in(text, kernel.lanes) | {"threads"}, kernel.lanes), JOB), text


class Printer(Loops, Partials, Accumulators):
    def __init__(self, kernel: Kernel, name: str):
        self.k, self.name = kernel, name
        self.renamed: dict[Axis, str] = {}  # axes that go by another name for the moment
        self.tail = False                   # printing the ragged end of a vector loop
        self.lines: dict | None = None      # the writes that `streaming` is about, and what each has in the place of @; None: all, their memory
        self.streaming: str | None = None   # in a loop whose results may go around the cache: C text of whether one does, at address &p
        self.sweeping = False               # printing rows that are swept over register by register
        self.chain = 0                      # which of several accumulators is being printed
        self.partial_slot = {}
        self.flushed: set[Accumulator] = set()
        self.carried: dict[Accumulator, bool] = {}      # what prefixes of f32 carry in f64, as eager does -> do they run along lanes?

    def text(self) -> str:
        body = []
        for p in self.k.phases:
            for q in p.partials:
                self.partial_slot[q] = 2 * len(self.partial_slot)
        for n, p in enumerate(self.k.phases):
            body.append(self._phase(p, n))
        body.append(self._entry())
        return "\n".join(body)

    # -- integers ---------------------------------------------------------------------------------------------------------
    def index(self, i: Index) -> str:
        """C text of an integer expression."""
        parts = []
        for k, v in sorted(i.terms.items(), key=lambda term: self._depth(term[0])):
            factors = [self._atom(a) for a in k]
            if v != 1 or not factors:
                factors.append(str(v) if v >= 0 else f"({v})")
            parts.append(" * ".join(factors))
        return " + ".join(parts) if parts else "0"

    def _depth(self, atoms) -> tuple[int, int]:
        """Place of a term in a sum: by its loop variable, constants last."""
        numbers = [int(self.k.axes[a][1:]) for a in atoms if isinstance(a, Axis)]
        return (0 if numbers else 1 if atoms else 2, min(numbers, default=0))

    def _atom(self, a) -> str:
        if isinstance(a, Axis):
            return self.renamed.get(a) or self.k.axes[a]
        if isinstance(a, (FloorDiv, Mod, Min, Max)):
            name = {FloorDiv: "tk_div", Mod: "tk_mod", Min: "tk_min", Max: "tk_max"}[type(a)]
            return f"{name}({self.index(a.a)}, {self.index(a.b)})"
        return a.name

    # -- phases -----------------------------------------------------------------------------------------------------------
    def _params(self, used: str) -> list[str]:
        words = set(re.findall(r"[A-Za-z_]\w*", used))
        written = {s.memory for p in self.k.phases for s in statements_of((*p.once, *p.body)) if isinstance(s, Write)}
        out = []
        for n, p in enumerate(self.k.params):
            if p.name not in words:
                continue
            if p.kind == "memory":
                const = "" if p.name in written else "const "
                out.append(f"{const}{p.dtype.c} *restrict {p.name} = ({const}{p.dtype.c} *)w[{n}];")
            elif p.kind == "float":
                out.append(f"double {p.name}; __builtin_memcpy(&{p.name}, &w[{n}], 8);")
            else:
                out.append(f"int64_t {p.name} = w[{n}];")
        return out

    def _phase(self, p: Phase, number: int) -> str:
        self.flushed |= {a for loop in loops_of((*p.once, *p.body)) for a in loop.flush}
        self.carried |= wide_prefixes((*p.once, *p.body))
        lines: list[str] = []
        extents = self._extents(p)
        for b in p.buffers:
            lines.append(f"{stored_type(b.dtype)} *{b.name} = aligned_alloc(64, tk_lines({self.index(b.size)} + W) * sizeof *{b.name});")
        if p.buffers:
            frees = " ".join(f"free({b.name});" for b in p.buffers)
            lines.append(f"if ({' || '.join(f'!{b.name}' for b in p.buffers)}) {{ {frees} *error |= {NO_MEMORY}; return; }}")
        for q in p.partials:
            lines += self._partial_start(q, not folds_columns(p))
        streamed = {s.memory: s for s in statements_of(p.body) if isinstance(s, Write) and s.total is not None}
        for s in streamed.values():
            lines.append(f"const int s{s.memory} = {self.index(s.total)} >= {self.k.stream // s.dtype.bytes};")
        for s in {s.memory: s for s in statements_of(p.body) if isinstance(s, Read) and s.ahead is not None}.values():
            low, high = (n // s.dtype.bytes for n in AHEAD)
            lines.append(f"const int ahead{s.memory} = {self.index(s.span)} >= {low} && {self.index(s.span)} <= {high};")
        for s in {s.memory: s for s in statements_of(p.body) if isinstance(s, Read) and s.total is not None}.values():
            lines.append(f"const int far{s.memory} = {self.index(s.total)} >= {FAR_FROM // s.dtype.bytes};")
        for s in p.once:
            lines += self._statement(s)
        if folds_columns(p):
            return self._function(number, [*lines, *self._columns(p)])
        body: list[str] = []
        if p.block:
            body.append(f"int64_t b0 = blk * {p.block}, b1 = tk_min(b0 + {p.block}, {self.index(p.extent)});")
        filled = max((n + 1 for n, s in enumerate(p.body) if isinstance(s, Refill)), default=0)
        first, rest = self._statements(p.body[:filled]), self._statements(p.body[filled:])
        body += [*first, *(self._rows(p, first, rest) if rows_in_step(p) else rest)]
        body += self._partial_runs(p.partials)
        several = in_step(body, extents[0][0], lines) if reads_rows(p) else None
        lines += self._parallel(extents, body, several, bool(p.inside) or any(q.runs for q in p.partials))
        lines += [f"free({b.name});" for b in p.buffers]
        if streamed:
            lines.append("settle();")
        return self._function(number, lines)

    def _function(self, number: int, lines: list[str]) -> str:
        """What every thread runs of a phase: its share, as `lines`."""
        inner = "\n".join("    " + x for x in lines)
        params = "\n".join("  " + x for x in self._params(inner))
        return (f"static void {self.name}_{number}(void *data) {{\n"
                f"  tk_job *job = data; const int64_t *w = job->w; int64_t *error = &job->error;\n{params}\n"
                f"  for (int64_t ticket; (ticket = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) < job->tickets;) {{\n{inner}\n  }}\n}}")

    def _extents(self, p: Phase) -> list[tuple[str, str]]:
        """(loop variable, how often it counts) of a share's loops, outermost first; `blk` counts blocks, STREAMS rows in step are counted as one."""
        extents = [(self.k.axes[a], self.index(e)) for a, e in p.parallel]
        if rows_in_step(p):
            extents[-1] = (f"g{extents[-1][0]}", f"(({extents[-1][1]}) + {STREAMS - 1}) / {STREAMS}")
        if p.block:
            extents.insert(len(extents) - p.inside, ("blk", f"(({self.index(p.extent)}) + {p.block - 1}) / {p.block}"))
        return extents

    def _rows(self, p: Phase, before: list[str], body: list[str]) -> list[str]:
        """`body`, behind the lines `before`, for the rows of one step."""
        axis, extent = p.parallel[-1]
        row = self.k.axes[axis]
        several = in_step(body, row, [*self._statements(p.once), *before])
        head = f"const int64_t q = 1, end = {self.index(extent)}; int64_t {row} = g{row} * {STREAMS};"
        one = [f"for (const int64_t top = tk_min({row} + {STREAMS}, end); {row} < top; {row}++) {{", *("  " + x for x in body), "}"]
        if several is None:
            return [head, *one]
        return [head, f"if ({row} + {STREAMS} <= end) {{", *("  " + x for x in several), "} else", *one]

    def _statements(self, items) -> list[str]:
        return [line for s in items for line in self._statement(s)]

    def _refill(self, s: Refill) -> list[str]:
        return [f"if ({self._again(s)}) {{", *self._block(s.items), "}"]

    def _again(self, s: Refill) -> str:
        """C text: is this the first iteration since the coordinates of other axes changed?"""
        counters = [v for p in self.k.phases for v, (a, _) in zip(self._counters(p), p.parallel) if a in s.axes]
        return f"at == lo || !({' | '.join(dict.fromkeys(counters))})"

    def _counters(self, p: Phase) -> list[str]:
        return [v for v, _ in self._extents(p) if v != "blk"]

    def _parallel(self, extents, body: list[str], several: list[str] | None, counted: bool) -> list[str]:
        """The loops of one ticket's share, as one counter with the coordinates carried along. `several`: the body of STREAMS iterations of one
        axis. `counted`: the body asks how many iterations were before it."""
        if not extents:
            return ["if (ticket == 0) {", *("  " + x for x in body), "}"]
        out = [f"const int64_t e{n} = {e};" for n, (_, e) in enumerate(extents)]
        total = " * ".join(f"e{n}" for n in range(len(extents)))
        out.append(f"int64_t total = {total}, lo = total * ticket / job->tickets, hi = total * (ticket + 1) / job->tickets, rest = lo;")
        for n in reversed(range(len(extents))):
            v = extents[n][0]
            out.append(f"int64_t {v} = " + (f"e{n} ? rest % e{n} : 0; rest = e{n} ? rest / e{n} : 0;" if n else "rest;"))
        if several is not None:
            v = extents[0][0]
            out += [f"const int64_t q = (hi - lo) / {STREAMS};", "for (int64_t at = 0; at < q; at++) {",
                    *("  " + x for x in several), f"  ++{v};", "}", f"lo += {STREAMS} * q; {v} = lo;"]
        if len(extents) > 1 and not counted:
            return out + self._nested(extents, body)
        out.append("for (int64_t at = lo; at < hi; at++) {")
        out += ["  " + x for x in body]
        out += [f"  {self._carry(extents)}", "}"]
        return out

    @staticmethod
    def _carry(extents) -> str:
        """The statement that goes on to the next coordinates."""
        step = ""
        for n, (v, _) in enumerate(extents):
            step = f"if (++{v} == e{n}) {{ {v} = 0; {step} }}" if n else f"++{v};"
        return step

    def _nested(self, extents, body: list[str]) -> list[str]:
        """The loops of a share whose innermost is one of C, around one over blocks if there is one: what is the same all along it is computed
        outside, and addresses by addition. Rows of 16, ms on one core, as one counter / so: an image's patches 0.81 / 0.46."""
        last = len(extents) - 1
        v, end = extents[last][0], f"e{last}"
        inner = [f"const int64_t stop = tk_min({end}, {v} + hi - at); at += stop - {v};",
                 f"for (; {v} < stop; {v}++) {{", *("  " + x for x in body), "}"]
        if v == "blk" and last > 1:
            last -= 1
            v, end = extents[last][0], f"e{last}"
            inner = [f"for (; {v} < {end} && at < hi; {v}++) {{", *("  " + x for x in inner), "  blk = 0;", "}"]
        return ["for (int64_t at = lo; at < hi;) {", *("  " + x for x in inner),
                f"  if ({v} == {end}) {{ {v} = 0; {self._carry(extents[:last])} }}", "}"]

    def _entry(self) -> str:
        lines = ["tk_job job = {w};", "int64_t copies = 1;"]
        frees = []
        for n, p in enumerate(self.k.phases):
            total = " * ".join(f"({e})" for _, e in self._extents(p))
            lines.append(f"{{ int64_t work = {self.index(p.work)}, total = {total or '1'};")
            # partial results: as many shares whatever the number of threads, so that sums do not depend on it
            shares = TICKETS if p.partials else "threads"
            lines.append(f"  job.tickets = work < {self.k.grain} ? 1 : tk_max(1, tk_min({shares}, total)); job.next = 0;")
            for q in p.partials:
                slot = self.partial_slot[q]
                bytes_of = f"{self._space(q)} * sizeof({stored_type(kept_type(q))})"
                lines.append(f"  job.copies = job.tickets; job.partial[{slot}] = aligned_alloc(64, job.tickets * {bytes_of});")
                frees.append(f"free(job.partial[{slot}]);")
                if q.monoid.startswith("arg"):
                    lines.append(f"  job.partial[{slot + 1}] = aligned_alloc(64, job.tickets * {self._space(q)} * 8);")
                    frees.append(f"free(job.partial[{slot + 1}]);")
            if p.partials:
                held = [f"job.partial[{self.partial_slot[q] + k}]" for q in p.partials for k in range(1 + q.monoid.startswith("arg"))]
                lines.append(f"  if ({' || '.join('!' + x for x in held)}) job.error |= {NO_MEMORY};")
            lines.append(f"  if (!(job.error & {NO_MEMORY})) tk_parallel({self.name}_{n}, &job, tk_min(threads, job.tickets)); }}")
        lines += frees
        lines.append("return job.error ? 1 + __builtin_ctzll(job.error) : 0;")
        inner = "\n".join("  " + x for x in lines)
        params = "\n".join("  " + x for x in self._params(inner))
        return f'__attribute__((visibility("default"))) int64_t {self.name}(const int64_t *w, int64_t threads) {{\n{params}\n{inner}\n}}\n'

    # -- statements -------------------------------------------------------------------------------------------------------
    def _statement(self, s) -> list[str]:
        if isinstance(s, Loop):
            return self._loop(s)
        out = getattr(self, f"_{type(s).__name__.lower()}")(s)
        return [out] if isinstance(out, str) else out

    def _block(self, items) -> list[str]:
        return ["  " + x for s in items for x in self._statement(s)]

    def _let(self, s: Let) -> str:
        args = list(s.args)
        fails = ops.can_fail(s.op, s.dtype)
        code = ""
        if fails:
            code = f"(int64_t)1 << {min(int(args.pop()) - 1, 61)}" if len(args) > ops.OPS[s.op].arity else "0"
        result = register(BOOL if ops.OPS[s.op].result == "bool" else s.dtype)
        return f"{result} {s.var} = {c_op(s.op, s.dtype, args, self._active(), 'error', code)};"

    def _active(self, guard: str | None = None) -> str:
        if guard is not None:
            return f"({guard} & lanes_below(n))" if self.tail else guard
        return "lanes_below(n)" if self.tail else "~(v_bool){0}"

    def _lanecompare(self, s: LaneCompare) -> str:
        if not s.step:
            return f"v_bool {s.var} = splat_bool(({self.index(s.base)}) {COMPARE[s.op]} {s.arg}[0]);"
        lanes, end = ("lanes()", "W") if s.step == 1 else (f"lanes() * {s.step}", f"{s.step} * W")
        return f"v_bool {s.var} = {lanes} {COMPARE[s.op]} lane_of({s.arg}[0], {self.index(s.base)}, {end});"

    def _lanedivide(self, s: LaneDivide) -> str:
        return f"v_i64 {s.var} = lanes_{'div' if s.op == 'floordiv' else 'mod'}({s.arg}, {self.index(s.by)});"

    def _divisor(self, s: Divisor) -> str:
        return f"v_f32 {s.var}s = scale_f32({s.arg}), {s.var} = 1.0f / ({s.arg} * {s.var}s);"

    def _quotient(self, s: Quotient) -> str:
        return f"v_f32 {s.var} = ({s.arg} * {s.by}s * {s.by});"

    def _convert(self, s: Convert) -> str:
        return f"{register(s.dtype)} {s.var} = cast_{s.source}_{s.dtype}({s.arg});"

    def _splat(self, s: Splat) -> str:
        return f"{register(s.dtype)} {s.var} = splat_{s.dtype}({number(s.text)});"

    def _indexvalue(self, s: IndexValue) -> str:
        text = f"splat_i64({self.index(s.base)})"
        if s.step.terms:
            text += " + iota()" if s.step == 1 else f" + iota() * splat_i64({self.index(s.step)})"
        for reg, factor in s.terms:
            text += f" + {reg}" if factor == 1 else f" + {reg} * splat_i64({self.index(factor)})"
        return f"v_i64 {s.var} = {text};"

    def _fetch(self, s: Fetch) -> str:
        code = f"(int64_t)1 << {min(s.code - 1, 61)}"
        if s.scalar:
            active = f"hany({self._active(s.guard)})" if s.guard else "1"
            return f"const int64_t {s.var} = tk_index({s.arg}[0], {self.index(s.bound)}, {active}, error, {code});"
        return f"v_i64 {s.var} = tk_indices({s.arg}, {self.index(s.bound)}, {self._active(s.guard)}, error, {code});"

    def _pointer(self, memory: str, address: Index) -> str:
        return memory if not address.terms else f"{memory} + ({self.index(address)})"

    def _read(self, s: Read) -> str:
        p, d = self._pointer(s.memory, s.address), s.dtype
        text = f"{register(d)} {s.var} = {self._guarded(s, p, d) if s.guard else self._plain_read(s.mode, p, d, s.step, s.at, s.turn)};"
        if self.sweeping and s.mode == "unit" and s.memory[0] == "p":
            return f"{text} __builtin_prefetch({p} + W, 0, 2);"
        if s.total is not None and not self.tail:
            return f"{text} if (far{s.memory}) __builtin_prefetch({p} + {FAR // d.bytes}, 0, 3);"
        if s.ahead is None or self.tail:
            return text
        return f"{text} if (ahead{s.memory}) __builtin_prefetch({self._pointer(s.memory, s.ahead)}, 0, 2);"

    def _plain_read(self, mode: str, p: str, d: DType, step: Index | None, at: str | None, turn: Index | None = None) -> str:
        n = ", n" if self.tail else ""
        tail = "n" if self.tail else ""
        if mode == "splat":
            return f"loadb_{d}({p})"
        if mode == "unit":
            return f"load{tail}_{d}({p}{n})"
        if mode == "strided":
            return f"loads{tail}_{d}({p}, {self.index(step)}{n})"
        if mode == "around":
            return f"loada{tail}_{d}({p}, {self.index(step)}, {self.index(turn)}{n})"
        return f"load{'w' if mode == 'window' else 'i'}{tail}_{d}({p}, {at}{n})"

    def _guarded(self, s: Read, p: str, d: DType) -> str:
        active = self._active(s.guard)
        if s.even or s.mode == "splat":
            return f"{s.guard}[0] ? {self._plain_read(s.mode, p, d, s.step, s.at)} : {s.other}"
        if s.mode == "gather":
            return f"loadgi_{d}({p}, {s.at}, {active}, {s.other})"
        if s.mode == "shared":
            return f"hany({active}) ? select_{d}({s.guard}, loadb_{d}({p}), {s.other}) : {s.other}"
        if s.mode == "unit":
            return f"loadgu_{d}({p}, {active}, {s.other})"
        return f"loadg_{d}({p}, {self.index(s.step)}, {active}, {s.other})"

    def _write(self, s: Write) -> list[str]:
        p, d = self._pointer(s.memory, s.address), s.dtype
        if s.widened and not self.tail:         # in two halves: a register of all lanes in f64 would live in memory
            return [f"{{ u_h *h = (u_h *)({p}); h[0] += lower_half({s.value}); h[1] += upper_half({s.value}); }}"]
        value = f"cast_f32_f64({s.value})" if s.widened else s.value
        before: list[str] = []
        if s.monoid not in (None, "last") and s.mode == "gather":
            return self._in_turn(s)
        if s.monoid not in (None, "last"):
            guarded = s.guard is not None and s.mode != "splat"
            old = self._guarded(Read("", s.memory, d, s.address, s.mode, s.step, s.at, s.guard, s.value), p, d) if guarded else \
                self._plain_read(s.mode, p, d, s.step, s.at)
            before.append(f"{register(d)} o{s.value} = {old};")
            value = self.combine(s.monoid, d, f"o{s.value}", value)
        n, tail = (", n", "n") if self.tail else ("", "")
        if s.guard is not None and s.mode == "splat":
            return [f"if ({s.guard}[0]) {{", *("  " + x for x in before), f"  store1_{d}({p}, {value});", "}"]
        if s.guard is not None and s.mode == "gather":
            return [*before, f"storegi_{d}({p}, {s.at}, {value}, {self._active(s.guard)});"]
        if s.guard is not None:
            step = "1" if s.mode == "unit" else self.index(s.step)
            return [*before, f"storeg_{d}({p}, {step}, {value}, {self._active(s.guard)});"]
        text = {"splat": f"store1_{d}({p}, {value});", "unit": f"store{tail}_{d}({p}, {value}{n});",
                "strided": f"stores{tail}_{d}({p}, {self.index(s.step) if s.step is not None else ''}, {value}{n});",
                "gather": f"storei{tail}_{d}({p}, {s.at}, {value}{n});"}[s.mode]
        if before:
            return ["{", *("  " + x for x in before), "  " + text, "}"]
        if s.total is not None and not self.tail and self.streaming is not None and (self.lines is None or s in self.lines):
            return [f"if ({self.streaming.replace('@', (self.lines or {}).get(s, s.memory)).replace('&p', p)}) stream_{d}({p}, {value}); else {text}"]
        return [text]

    def _in_turn(self, s: Write) -> list[str]:
        """Updates at gathered places, where lanes may meet: one lane after the other."""
        d, p, k = s.dtype, f"{self._pointer(s.memory, s.address)} + {s.at}k[k]", "n" if self.tail else "W"
        one = f"v{s.value}[k]"
        out = [f"int64_t {s.at}k[W] __attribute__((aligned(64))); store_i64({s.at}k, {s.at}); const {register(d)} v{s.value} = {s.value};",
               f"for (int64_t k = 0; k < {k}; k++)" + (f" if ({s.guard}[k])" if s.guard is not None else "")
               + f" store1_{d}({p}, {self.combine(s.monoid, d, f'loadb_{d}({p})', f'splat_{d}({one})')});"]
        return ["{", *("  " + x for x in out), "}"]

    def _randomvalue(self, s: RandomValue) -> str:
        return f"v_f32 {s.var} = philox_{s.kind}({s.seed}, {s.index});"
