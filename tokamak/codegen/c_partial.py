"""Partial results as C text: each share of a kernel's work folds into a copy of its own, and a later phase folds the copies."""
from __future__ import annotations

from ..ir import ops
from ..ir.dtype import F32, F64, DType
from .c_memory import number, register
from .kernel import BLOCK, FEWEST_NEAR, NEAR, Convert, LaneCompare, Let, Loop, Partial, PartialRead, PartialUpdate, Phase, Quotient, Read, Splat
from .scope import literal


ROW = 5                 # statements of a row that are made again for each register of its columns


def folds_columns(p: Phase) -> bool:
    """Is an iteration a row's one loop over its columns, which does nothing but add them to partial results?"""
    loops = [s for s in p.body if isinstance(s, Loop)]
    if len(p.parallel) != 1 or p.block or p.buffers or p.inside or len(loops) != 1 or p.body[-1] is not loops[0] or not loops[0].vector:
        return False
    known = (Read, Let, Convert, Splat, LaneCompare, Quotient, PartialUpdate)
    light = not any(isinstance(s, Let) and ops.OPS[s.op].heavy for s in p.body)
    return light and bool(p.partials) and all(q.runs for q in p.partials) and len(p.body) <= ROW \
        and all(isinstance(s, known) for s in (*p.body[:-1], *loops[0].items))


class Partials:
    """The printer's part for partial results. The printer has `tail`, `index`, `_pointer`, `combine`, `_neutral`, `_take`."""
    copies = "job->copies"
    standing = False                        # printing rows whose columns stand in registers
    partial_slot: dict[Partial, int]         # its place in the job; that of its indices behind it

    def _partial_start(self, q: Partial, runs: bool) -> list[str]:
        """This share's copy, with nothing in it yet; `runs`: with f32 sums of the current run."""
        slot, kept = self.partial_slot[q], kept_type(q)
        c = stored_type(kept)
        size = self.index(q.size)
        one = number(literal(ops.identity(q.monoid, kept), kept))
        out = [f"{c} *{q.name} = ({c} *)job->partial[{slot}] + ticket * {self._space(q)};",
               f"for (int64_t z = 0; z < {size}; z++) {q.name}[z] = {one};"]
        if runs and q.runs:
            out += [f"float *{q.name}r = (float *)({q.name} + tk_lines({size} + W));",
                    f"for (int64_t z = 0; z < {size}; z += W) store_f32({q.name}r + z, (v_f32){{0}});"]
        if q.monoid.startswith("arg"):
            out += [f"int64_t *{q.name}i = (int64_t *)job->partial[{slot + 1}] + ticket * {self._space(q)};",
                    f"for (int64_t z = 0; z < {size}; z++) {q.name}i[z] = 9223372036854775807;"]
        return out

    def _space(self, q: Partial) -> str:
        """Elements of one copy: in f64 with the f32 sums of the current run behind them."""
        size = f"tk_lines({self.index(q.size)} + W)"
        return f"{size} / 2 * 3" if q.runs else size

    def _partial_runs(self, partials) -> list[str]:
        """At the end of an iteration: f32 sums of BLOCK iterations, and the last ones of a share, move into f64."""
        runs = [q for q in partials if q.runs]
        if not runs:
            return []
        out = [f"if ((at - lo) % {BLOCK} == {BLOCK - 1} || at + 1 == hi) {{"]
        for q in runs:
            out += [f"  for (int64_t z = 0; z < {self.index(q.size)}; z += W) {{",
                    f"    v_f32 r = load_f32({q.name}r + z); store_f32({q.name}r + z, (v_f32){{0}});",
                    f"    u_h *h = (u_h *)({q.name} + z); h[0] += lower_half(r); h[1] += upper_half(r); }}"]
        return [*out, "}"]

    def _columns(self, p: Phase) -> list[str]:
        """A share of a phase that folds columns: a few rows at a time, whose columns stand in registers."""
        loop, q, (axis, extent) = p.body[-1], p.partials, p.parallel[0]
        v, row, high = self.k.axes[loop.axis], self.k.axes[axis], self.index(loop.high)
        names = " ".join(f"v_f32 {x.name}s = {{0}};" for x in q)

        def piece(tail: bool) -> list[str]:
            self.tail, self.standing = tail, True
            rows = [f"for (int64_t {row} = at; {row} < top; {row}++) {{", *self._block((*p.body[:-1], *loop.items)), "}"]
            self.standing = False
            added = [f"{{ u_h *h = (u_h *)({x.name} + {v}); h[0] += lower_half({x.name}s); h[1] += upper_half({x.name}s); }}" if not tail else
                     f"storen_f64({x.name} + {v}, loadn_f64({x.name} + {v}, n) + cast_f32_f64({x.name}s), n);" for x in q]
            self.tail = False
            return ["  " + x for x in (names, *rows, *added)]
        return [f"const int64_t total = {self.index(extent)}, lo = total * ticket / job->tickets, hi = total * (ticket + 1) / job->tickets;",
                f"const int64_t rows = tk_min({BLOCK}, tk_max({FEWEST_NEAR}, {NEAR} / (4 * ({high}) + 1)));",
                "for (int64_t at = lo, top; at < hi; at = top) {", "  top = tk_min(at + rows, hi);", f"  int64_t {v} = 0;",
                f"  for (; {v} + W <= {high}; {v} += W) {{", *("  " + x for x in piece(False)), "  }",
                f"  if ({v} < {high}) {{ const int64_t n = {high} - {v};", *("  " + x for x in piece(True)), "  }", "}"]

    def _partialupdate(self, s: PartialUpdate) -> list[str]:
        if self.standing:
            return [f"{s.partial.name}s += {s.args[0]};"]
        q, kept = s.partial, kept_type(s.partial) if not s.partial.runs else F32
        p = self._pointer(q.name + "r" * q.runs, s.address)
        n, tail = (", n", "n") if self.tail and s.mode == "unit" else ("", "")
        load = f"load{tail}_{{}}({{}}{n})" if s.mode == "unit" else "loadb_{}({})"
        store = f"store{tail}_{{}}({{}}, {{}}{n})" if s.mode == "unit" else "store1_{}({}, {})"
        value = s.args[0] if kept is q.dtype else f"cast_{q.dtype}_{kept}({s.args[0]})"
        if kept is F64 and q.dtype is F32 and s.mode == "unit" and not self.tail:       # a register of all lanes in f64 would live in memory
            return [f"{{ u_h *h = (u_h *)({p}); h[0] += lower_half({s.args[0]}); h[1] += upper_half({s.args[0]}); }}"]
        if not q.monoid.startswith("arg"):
            return [store.format(kept, p, self.combine(q.monoid, kept, load.format(kept, p), value)) + ";"]
        pi = self._pointer(f"{q.name}i", s.address)
        v = register(kept)
        return [f"{{ {v} ov = {load.format(kept, p)}; v_i64 oi = {load.format('i64', pi)};",
                *self._take(q.monoid, kept, "ov", "oi", value, s.args[1]),
                store.format(kept, p, "ov") + "; " + store.format("i64", pi, "oi") + "; }"]

    def _partialread(self, s: PartialRead) -> list[str]:
        q, kept = s.partial, kept_type(s.partial)
        slot, c, v, x = self.partial_slot[q], stored_type(kept), register(kept), s.vars[0]
        n, tail = (", n", "n") if self.tail and s.mode == "unit" else ("", "")
        load = f"load{tail}_{{}}({{}}{n})" if s.mode == "unit" else "loadb_{}({})"
        at = self.index(s.address)
        p = f"{self._share(q, c, slot)} + {at}"
        out = [f"{v} {x}k = {self._neutral(q.monoid, kept)};"]
        if q.monoid.startswith("arg"):
            out.append(f"v_i64 {s.vars[1]} = splat_i64(9223372036854775807);")
            place = load.format("i64", f"{self._share(q, 'int64_t', slot + 1)} + {at}")
            update = self._take(q.monoid, kept, f"{x}k", s.vars[1], load.format(kept, p), place)
        else:
            update = [f"{x}k = {self.combine(q.monoid, kept, f'{x}k', load.format(kept, p))};"]
        out += [f"for (int64_t z = 0; z < {self.copies}; z++) {{", *("  " + u for u in update), "}"]
        out.append(f"{register(q.dtype)} {x} = " + (f"{x}k;" if kept is q.dtype else f"cast_{kept}_{q.dtype}({x}k);"))
        return out

    def _share(self, q: Partial, c: str, slot: int) -> str:
        """Address of copy z of a partial result."""
        return f"({c} *)job->partial[{slot}] + z * {self._space(q)}"


def kept_type(q: Partial) -> DType:
    """What the copies of a partial result are made of: f32 sums are kept in f64."""
    return F64 if q.monoid == "sum" and q.dtype is F32 else q.dtype


def stored_type(d: DType) -> str:
    """The C type of an element in scratch memory: 16-bit floats are kept in f32."""
    return "float" if d.is_half else d.c
