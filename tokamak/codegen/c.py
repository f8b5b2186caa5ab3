"""Kernel -> C text. This printer decides nothing: statement in, text out.

A kernel becomes one exported function `int64_t NAME(const int64_t *w, int64_t threads)` and one static function a phase, which every thread runs:
it takes tickets until none is left, so any number of threads gives every share exactly once. The vector loop is printed twice, for whole
registers and for the ragged end, in which `n` lanes count.
"""
from __future__ import annotations

from ..ir import ops
from ..ir.dtype import BOOL, F32, F64, DType
from ..ir.index import Axis, FloorDiv, Index, Max, Min, Mod
from .c_memory import register
from .c_ops import c_op, can_fail
from .c_prelude import fragments_in, pieces
from .kernel import (BLOCK, ROWS, Accumulator, Convert, Fetch, Finish, Fold, IndexValue, Kernel, Let, Loop, Partial, PartialRead, PartialUpdate,
                     Phase, Prefix, RandomValue, Read, Splat, Tile, Write)
from .scope import literal

TICKETS = 16            # shares of a kernel with partial results
NO_MEMORY = "((int64_t)1 << 62)"       # the error of a kernel that could not have its scratch memory
PARTIALS = 64           # arrays of partial results that a kernel may have

_JOB = f"""\
typedef struct {{ const int64_t *w; int64_t tickets, next, error, copies; void *partial[{PARTIALS}]; }} tk_job;
extern void *malloc(unsigned long); extern void free(void *);
"""


def render(kernel: Kernel, name: str) -> tuple[tuple[str, ...], str]:
    """(prelude, text): the C text of `kernel` as function `name`, and the pieces of text that stand before it."""
    text = Printer(kernel, name).text()
    return (*pieces(fragments_in(text, kernel.lanes) | {"threads"}, kernel.lanes), _JOB), text


class Printer:
    def __init__(self, kernel: Kernel, name: str):
        self.k, self.name = kernel, name
        self.renamed: dict[Axis, str] = {}  # axes that go by another name for the moment
        self.tail = False                   # printing the ragged end of a vector loop
        self.partial_slot: dict[Partial, int] = {}
        self.flushed: set[Accumulator] = set()

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
        import re
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
        lines: list[str] = []
        extents = [(self.k.axes[a], self.index(e)) for a, e in p.parallel]
        if p.block:
            extents.append(("blk", f"(({self.index(p.extent)}) + {p.block - 1}) / {p.block}"))
        for b in p.buffers:
            lines.append(f"{stored_type(b.dtype)} *{b.name} = malloc(({self.index(b.size)} + W) * sizeof *{b.name});")
        if p.buffers:
            frees = " ".join(f"free({b.name});" for b in p.buffers)
            lines.append(f"if ({' || '.join(f'!{b.name}' for b in p.buffers)}) {{ {frees} *error |= {NO_MEMORY}; return; }}")
        for q in p.partials:
            lines += self._partial_start(q)
        for s in p.once:
            lines += self._statement(s)
        body: list[str] = []
        if p.block:
            body.append(f"int64_t b0 = blk * {p.block}, b1 = tk_min(b0 + {p.block}, {self.index(p.extent)});")
        for s in p.body:
            body += self._statement(s)
        lines += self._parallel(extents, body)
        lines += [f"free({b.name});" for b in p.buffers]
        inner = "\n".join("    " + x for x in lines)
        params = "\n".join("  " + x for x in self._params(inner))
        return (f"static void {self.name}_{number}(void *data) {{\n  tk_job *job = data; const int64_t *w = job->w; int64_t *error = &job->error;\n{params}\n"
                f"  for (int64_t ticket; (ticket = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) < job->tickets;) {{\n{inner}\n  }}\n}}")

    def _parallel(self, extents, body: list[str]) -> list[str]:
        """The loops of one ticket's share, as one counter with the coordinates carried along."""
        if not extents:
            return ["if (ticket == 0) {", *("  " + x for x in body), "}"]
        out = [f"const int64_t e{n} = {e};" for n, (_, e) in enumerate(extents)]
        total = " * ".join(f"e{n}" for n in range(len(extents)))
        out.append(f"int64_t total = {total}, lo = total * ticket / job->tickets, hi = total * (ticket + 1) / job->tickets, rest = lo;")
        for n in reversed(range(len(extents))):
            v = extents[n][0]
            out.append(f"int64_t {v} = " + (f"e{n} ? rest % e{n} : 0; rest = e{n} ? rest / e{n} : 0;" if n else "rest;"))
        out.append("for (int64_t at = lo; at < hi; at++) {")
        out += ["  " + x for x in body]
        step = ""
        for n in range(len(extents)):
            v = extents[n][0]
            step = f"if (++{v} == e{n}) {{ {v} = 0; {step} }}" if n else f"++{v};"
        out += ["  " + step, "}"]
        return out

    def _entry(self) -> str:
        lines = ["tk_job job = {w};", "int64_t copies = 1;"]
        frees = []
        for n, p in enumerate(self.k.phases):
            total = " * ".join([f"({self.index(e)})" for _, e in p.parallel] + ([f"((({self.index(p.extent)}) + {p.block - 1}) / {p.block})"] if p.block else []))
            lines.append(f"{{ int64_t work = {self.index(p.work)}, total = {total or '1'};")
            # partial results: as many shares whatever the number of threads, so that sums do not depend on it
            shares = TICKETS if p.partials else "threads"
            lines.append(f"  job.tickets = work < {self.k.grain} ? 1 : tk_max(1, tk_min({shares}, total)); job.next = 0;")
            for q in p.partials:
                slot = self.partial_slot[q]
                lines.append(f"  job.copies = job.tickets; job.partial[{slot}] = malloc(job.tickets * ({self.index(q.size)} + W) * sizeof({stored_type(_kept(q))}));")
                frees.append(f"free(job.partial[{slot}]);")
                if q.monoid.startswith("arg"):
                    lines.append(f"  job.partial[{slot + 1}] = malloc(job.tickets * ({self.index(q.size)} + W) * 8);")
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

    def _loop(self, loop: Loop) -> list[str]:
        v, low, high = self.k.axes[loop.axis], self.index(loop.low), self.index(loop.high)
        step = self.k.lanes if loop.vector else 1
        if loop.tiles:
            return self._tiled_loop(loop, v, low, high)
        if loop.flush:
            part = f"tk_min(c{v} + {BLOCK * step}, {high})"
            inner = self._plain_loop(loop, v, f"c{v}", f"d{v}", step)
            flush = [f"  {a.var}w += cast_f32_f64({a.var}); {a.var} = (v_f32){{0}};" for a in loop.flush]
            return [f"for (int64_t c{v} = {low}; c{v} < {high}; c{v} += {BLOCK * step}) {{ const int64_t d{v} = {part};", *("  " + x for x in inner), *flush, "}"]
        return self._plain_loop(loop, v, low, high, step)

    def _tiled_loop(self, loop: Loop, v: str, low: str, high: str) -> list[str]:
        """A loop around one vector loop, turned inside out: pieces of ROWS steps inside the vector loop, each with its tiles filled first."""
        inner = next(s for s in loop.items if isinstance(s, Loop))
        body = Loop(loop.axis, loop.low, loop.high, False, [x for s in loop.items for x in (s.items if s is inner else [s])])
        x, start, end = self.k.axes[inner.axis], self.index(inner.low), self.index(inner.high)
        rows = lambda: [y for t in loop.tiles for y in self._fill(t, loop.axis, v)] + self._plain_loop(body, v, f"c{v}", f"d{v}", 1)
        out = [f"{t.dtype.c} {t.name}[{ROWS} * W] __attribute__((aligned(64)));" for t in loop.tiles]
        out += [f"for (int64_t c{v} = {low}; c{v} < {high}; c{v} += {ROWS}) {{ const int64_t d{v} = tk_min(c{v} + {ROWS}, {high}); int64_t {x} = {start};",
                f"  for (; {x} + W <= {end}; {x} += W) {{", *("    " + y for y in rows()), "  }"]
        self.tail = True
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
                    f"    for (int k = 0; k < W; k++) r[k] = load_{t.dtype}(s + k * {step} + j);",
                    f"    transpose_{t.dtype.bytes * 8}((void *)r);",
                    f"    for (int k = 0; k < W; k++) store_{t.dtype}({t.name} + (j + k) * W, r[k]); }}"]
        out.append(f"  for (int64_t k = 0; k < {lanes}; k++) for (int64_t i = j; i < d{v} - c{v}; i++) {t.name}[i * W + k] = s[k * {step} + i]; }}")
        return out

    def _plain_loop(self, loop: Loop, v: str, low: str, high: str, step: int) -> list[str]:
        if not loop.vector:
            return [f"for (int64_t {v} = {low}; {v} < {high}; {v}++) {{", *self._block(loop.items), "}"]
        out = [f"int64_t {v} = {low};", f"for (; {v} + {step} <= {high}; {v} += {step}) {{", *self._block(loop.items), "}"]
        self.tail = True
        out += [f"if ({v} < {high}) {{ const int64_t n = {high} - {v};", *self._block(loop.items), "}"]
        self.tail = False
        return ["{", *("  " + x for x in out), "}"]

    def _let(self, s: Let) -> str:
        args = list(s.args)
        fails = can_fail(s.op, s.dtype)
        code = ""
        if fails:
            code = f"(int64_t)1 << {min(int(args.pop()) - 1, 61)}" if len(args) > ops.OPS[s.op].arity else "0"
        result = register(BOOL if ops.OPS[s.op].result == "bool" else s.dtype)
        return f"{result} {s.var} = {c_op(s.op, s.dtype, args, self._active(), 'error', code)};"

    def _active(self, guard: str | None = None) -> str:
        if guard is not None:
            return f"({guard} & lanes_below(n))" if self.tail else guard
        return "lanes_below(n)" if self.tail else "~(v_bool){0}"

    def _convert(self, s: Convert) -> str:
        return f"{register(s.dtype)} {s.var} = cast_{s.source}_{s.dtype}({s.arg});"

    def _splat(self, s: Splat) -> str:
        text = {"inf": "__builtin_inf()", "-inf": "-__builtin_inf()", "nan": "__builtin_nan(\"\")"}.get(s.text, s.text)
        if text == str(-(2**63)):
            text = "(-9223372036854775807 - 1)"
        return f"{register(s.dtype)} {s.var} = splat_{s.dtype}({text});"

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
        return f"{register(d)} {s.var} = {self._guarded(s, p, d) if s.guard else self._plain_read(s.mode, p, d, s.step, s.at)};"

    def _plain_read(self, mode: str, p: str, d: DType, step: Index | None, at: str | None) -> str:
        n = ", n" if self.tail else ""
        tail = "n" if self.tail else ""
        if mode == "splat":
            return f"loadb_{d}({p})"
        if mode == "unit":
            return f"load{tail}_{d}({p}{n})"
        if mode == "strided":
            return f"loads{tail}_{d}({p}, {self.index(step)}{n})"
        return f"loadi{tail}_{d}({p}, {at}{n})"

    def _guarded(self, s: Read, p: str, d: DType) -> str:
        active = self._active(s.guard)
        if s.mode == "gather":
            return f"loadgi_{d}({p}, {s.at}, {active}, {s.other})"
        if s.mode == "splat":
            return f"{s.guard}[0] ? loadb_{d}({p}) : {s.other}"
        if s.mode == "shared":
            return f"hany({active}) ? select_{d}({s.guard}, loadb_{d}({p}), {s.other}) : {s.other}"
        step = "1" if s.mode == "unit" else self.index(s.step)
        slow = f"loadg_{d}({p}, {step}, {active}, {s.other})"
        if self.tail or s.mode != "unit":
            return slow
        return f"hall({s.guard}) ? load_{d}({p}) : {slow}"

    def _write(self, s: Write) -> list[str]:
        p, d = self._pointer(s.memory, s.address), s.dtype
        value = s.value
        before: list[str] = []
        if s.monoid not in (None, "last"):
            guarded = s.guard is not None and s.mode != "splat"
            old = self._guarded(Read("", s.memory, d, s.address, s.mode, s.step, s.at, s.guard, s.value), p, d) if guarded else \
                self._plain_read(s.mode, p, d, s.step, s.at)
            before.append(f"{register(d)} o{s.value} = {old};")
            value = self.combine(s.monoid, d, f"o{s.value}", s.value)
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
        return [text]

    # -- folds ------------------------------------------------------------------------------------------------------------
    def combine(self, monoid: str, d: DType, a: str, b: str) -> str:
        """C text of a (+) b on registers."""
        if monoid == "sum":
            return f"({a} + {b})"
        if monoid == "prod":
            return f"({a} * {b})"
        if monoid in ("max", "min"):
            return f"{monoid}_{d}({a}, {b})"
        if monoid == "logsumexp":
            top, low = f"max_{d}({a}, {b})", f"min_{d}({a}, {b})"
            return f"select_{d}(eq_{d}({top}, {low}) & isinf_{d}({top}), {top}, {top} + log1p_{d}(exp_{d}({low} - {top})))"
        return f"({a} {'|' if monoid == 'any' else '&'} {b})"

    def _neutral(self, monoid: str, d: DType) -> str:
        return self._splat(Splat("", d, literal(ops.identity(monoid, d), d))).split("= ", 1)[1].rstrip(";")

    def _accumulator(self, a: Accumulator) -> str:
        text = f"{register(a.dtype)} {a.var} = {self._neutral(a.monoid, a.dtype)};"
        if a.monoid.startswith("arg"):
            text += f" v_i64 {a.var}i = splat_i64(9223372036854775807);"
        if a in self.flushed:
            text += f" v_f64 {a.var}w = {{0}};"
        if _watched(a):
            text += f" v_bool {a.var}n = {{0}};"
        return text

    def _masked(self, monoid: str, d: DType, args) -> list[str]:
        out = [f"select_{d}(lanes_below(n), {args[0]}, {self._neutral(monoid, d)})"]
        if len(args) > 1:
            out.append(f"select_i64(lanes_below(n), {args[1]}, splat_i64(9223372036854775807))")
        return out

    def _fold(self, s: Fold) -> list[str]:
        a, d = s.accumulator, s.accumulator.dtype
        args = self._masked(a.monoid, d, s.args) if s.masked and self.tail else list(s.args)
        if a.monoid.startswith("arg"):
            return self._take(a.monoid, d, a.var, f"{a.var}i", args[0], args[1])
        if _watched(a):      # two short chains of dependent operations in place of a long one
            name = {"max": "top", "min": "low"}[a.monoid]
            return [f"{a.var} = {name}_{d}({args[0]}, {a.var}); {a.var}n |= isnan_{d}({args[0]});"]
        return [f"{a.var} = {self.combine(a.monoid, d, a.var, args[0])};"]

    def _take(self, monoid: str, d: DType, va: str, ia: str, vb: str, ib: str) -> list[str]:
        v = register(d)
        return [f"{{ {v} tv = {vb}; v_i64 ti = {ib}; v_bool take = {monoid}_take_{d}({va}, {ia}, tv, ti); "
                f"{va} = select_{d}(take, tv, {va}); {ia} = select_i64(take, ti, {ia}); }}"]

    def _finish(self, s: Finish) -> list[str]:
        a, d = s.accumulator, s.accumulator.dtype
        if a.monoid.startswith("arg"):
            if not s.across:
                return [f"{register(d)} {s.vars[0]} = {a.var}; v_i64 {s.vars[1]} = {a.var}i;"]
            return [f"v_i64 {s.vars[1]} = splat_i64(h{a.monoid}_{d}({a.var}, {a.var}i)); "
                    f"{register(d)} {s.vars[0]} = splat_{d}(h{a.monoid[3:]}_{d}({a.var}));"]
        if a in self.flushed:
            wide = f"{a.var}w + cast_f32_f64({a.var})"
            return [f"v_f32 {s.vars[0]} = " + (f"splat_f32((float)hsum_f64({wide}));" if s.across else f"cast_f64_f32({wide});")]
        value = f"select_{d}({a.var}n, splat_{d}(__builtin_nan(\"\")), {a.var})" if _watched(a) else a.var
        return [f"{register(d)} {s.vars[0]} = {self._across(a.monoid, d, value) if s.across else value};"]

    def _across(self, monoid: str, d: DType, reg: str) -> str:
        if d is BOOL:
            return f"splat_bool({'hall' if monoid in ('all', 'min', 'prod') else 'hany'}({reg}))"
        return f"splat_{d}(h{monoid}_{d}({reg}))"

    def _prefix(self, s: Prefix) -> list[str]:
        a, d = s.accumulator, s.accumulator.dtype
        args = self._masked(a.monoid, d, s.args) if s.along and self.tail else list(s.args)
        v = register(d)
        if a.monoid.startswith("arg"):
            return [*self._take(a.monoid, d, a.var, f"{a.var}i", args[0], args[1]), f"{v} {s.vars[0]} = {a.var}; v_i64 {s.vars[1]} = {a.var}i;"]
        if not s.along:
            return [f"{a.var} = {self.combine(a.monoid, d, a.var, args[0])};", f"{v} {s.vars[0]} = {a.var};"]
        return [f"{v} {s.vars[0]} = {self.combine(a.monoid, d, a.var, f'scan{a.monoid}_{d}({args[0]})')};", f"{a.var} = splat_{d}({s.vars[0]}[W - 1]);"]

    # -- partial results ----------------------------------------------------------------------------------------------------
    def _partial_start(self, q: Partial) -> list[str]:
        slot, kept = self.partial_slot[q], _kept(q)
        c = stored_type(kept)
        size = self.index(q.size)
        one = {"inf": "__builtin_inf()", "-inf": "-__builtin_inf()"}.get(literal(ops.identity(q.monoid, kept), kept), literal(ops.identity(q.monoid, kept), kept))
        one = "(-9223372036854775807 - 1)" if one == str(-(2**63)) else one
        out = [f"{c} *{q.name} = ({c} *)job->partial[{slot}] + ticket * ({size} + W);", f"for (int64_t z = 0; z < {size}; z++) {q.name}[z] = {one};"]
        if q.monoid.startswith("arg"):
            out += [f"int64_t *{q.name}i = (int64_t *)job->partial[{slot + 1}] + ticket * ({size} + W);",
                    f"for (int64_t z = 0; z < {size}; z++) {q.name}i[z] = 9223372036854775807;"]
        return out

    def _partialupdate(self, s: PartialUpdate) -> list[str]:
        q, kept = s.partial, _kept(s.partial)
        p = self._pointer(q.name, s.address)
        n, tail = (", n", "n") if self.tail and s.mode == "unit" else ("", "")
        load = f"load{tail}_{{}}({{}}{n})" if s.mode == "unit" else "loadb_{}({})"
        store = f"store{tail}_{{}}({{}}, {{}}{n})" if s.mode == "unit" else "store1_{}({}, {})"
        value = s.args[0] if kept is q.dtype else f"cast_{q.dtype}_{kept}({s.args[0]})"
        if not q.monoid.startswith("arg"):
            return [store.format(kept, p, self.combine(q.monoid, kept, load.format(kept, p), value)) + ";"]
        pi = self._pointer(f"{q.name}i", s.address)
        v = register(kept)
        return [f"{{ {v} ov = {load.format(kept, p)}; v_i64 oi = {load.format('i64', pi)};", *self._take(q.monoid, kept, "ov", "oi", value, s.args[1]),
                store.format(kept, p, "ov") + "; " + store.format("i64", pi, "oi") + "; }"]

    def _partialread(self, s: PartialRead) -> list[str]:
        q, kept = s.partial, _kept(s.partial)
        slot, c, v, x = self.partial_slot[q], stored_type(kept), register(kept), s.vars[0]
        n, tail = (", n", "n") if self.tail and s.mode == "unit" else ("", "")
        load = f"load{tail}_{{}}({{}}{n})" if s.mode == "unit" else "loadb_{}({})"
        at = self.index(s.address)
        p = f"{self._share(q, c, slot)} + {at}"
        out = [f"{v} {x}k = {self._neutral(q.monoid, kept)};"]
        if q.monoid.startswith("arg"):
            out.append(f"v_i64 {s.vars[1]} = splat_i64(9223372036854775807);")
            update = self._take(q.monoid, kept, f"{x}k", s.vars[1], load.format(kept, p), load.format("i64", f"{self._share(q, 'int64_t', slot + 1)} + {at}"))
        else:
            update = [f"{x}k = {self.combine(q.monoid, kept, f'{x}k', load.format(kept, p))};"]
        out += [f"for (int64_t z = 0; z < {self.copies}; z++) {{", *("  " + u for u in update), "}"]
        out.append(f"{register(q.dtype)} {x} = " + (f"{x}k;" if kept is q.dtype else f"cast_{kept}_{q.dtype}({x}k);"))
        return out

    copies = "job->copies"

    def _share(self, q: Partial, c: str, slot: int) -> str:
        """Address of copy z of a partial result."""
        return f"({c} *)job->partial[{slot}] + z * ({self.index(q.size)} + W)"

    def _randomvalue(self, s: RandomValue) -> str:
        return f"v_f32 {s.var} = philox_{s.kind}({s.seed}, {s.index});"


def _watched(a: Accumulator) -> bool:
    """Folds that carry a mask of the lanes in which they met a NaN."""
    return a.monoid in ("max", "min") and a.dtype.is_float


def _kept(q: Partial) -> DType:
    """What the copies of a partial result are made of: f32 sums are kept in f64."""
    return F64 if q.monoid == "sum" and q.dtype is F32 else q.dtype


def stored_type(d: DType) -> str:
    return "float" if d.is_half else d.c


def loops_of(items):
    for s in items:
        if isinstance(s, Loop):
            yield s
            yield from loops_of(s.items)


def statements_of(items):
    for s in items:
        if isinstance(s, Loop):
            yield from statements_of(s.items)
        else:
            yield s
