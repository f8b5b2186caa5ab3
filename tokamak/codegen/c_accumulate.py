"""Accumulators as C text: registers that carry folds and prefixes, what is added to them, and what they come to."""
from __future__ import annotations

from ..ir import ops
from ..ir.dtype import BOOL, DType
from .c_loop import WATCHED, watched
from .c_memory import register
from .kernel import Accumulator, Finish, Fold, Prefix, Splat
from .scope import literal

LARGEST = "0x1.fffffep127f"             # of f32


class Accumulators:
    """The printer's part for folds and prefixes. The printer has `tail`, `chain`, `chained`, `carried`, `flushed`, `_active`, `_splat`."""

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
        if a in self.carried:
            first = "1" if a.monoid == "prod" else "0"
            if a.monoid == "logsumexp":
                return f"double {a.var} = -__builtin_inf();" if self.carried[a] else f"v_f32 {a.var} = splat_f32(-{LARGEST}); " \
                    f"h_f64 {a.var}l = (h_f64){{0}}, {a.var}h = {a.var}l;"
            return f"double {a.var} = 0;" if self.carried[a] else f"h_f64 {a.var}l = (h_f64){{0}} + {first}, {a.var}h = {a.var}l;"
        if a in self.flushed:
            text += f" h_f64 {a.var}l = {{0}}, {a.var}h = {{0}};"
        if watched(a):
            text += f" v_bool {a.var}n = {{0}};"
        return text

    def _masked(self, monoid: str, d: DType, args) -> list[str]:
        out = [f"select_{d}(lanes_below(n), {args[0]}, {self._neutral(monoid, d)})"]
        if len(args) > 1:
            out.append(f"select_i64(lanes_below(n), {args[1]}, splat_i64(9223372036854775807))")
        return out

    def _fold(self, s: Fold) -> list[str]:
        a, d, var = s.accumulator, s.accumulator.dtype, self.chained(s.accumulator, self.chain)
        if s.only is not None:
            active = self._active(s.only)
            return [f"if (hany({active})) {var} = {self.combine(a.monoid, d, var, f'select_{d}({active}, {s.args[0]}, {var})')};"]
        args = self._masked(a.monoid, d, s.args) if s.masked and self.tail else list(s.args)
        if a.monoid.startswith("arg"):
            return self._take(a.monoid, d, a.var, f"{a.var}i", args[0], args[1])
        if watched(a):      # two short chains of dependent operations in place of a long one
            return [f"{var} = {WATCHED[a.monoid]}_{d}({args[0]}, {var}); {a.var}n |= isnan_{d}({args[0]});"]
        return [f"{var} = {self.combine(a.monoid, d, var, args[0])};"]

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
            halves = f"{a.var}l, {a.var}h"
            return [f"v_f32 {s.vars[0]} = " + (f"splat_f32((float)hsum_halves({halves}));" if s.across else f"join_halves({halves});")]
        value = f"select_{d}({a.var}n, splat_{d}(__builtin_nan(\"\")), {a.var})" if watched(a) else a.var
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
        if a in self.carried and a.monoid == "logsumexp":
            return self._log_prefix(s, a.var, s.vars[0], args[0])
        if a in self.carried:
            if not s.along:
                by = "*=" if a.monoid == "prod" else "+="
                return [f"{a.var}l {by} lower_half({args[0]}); {a.var}h {by} upper_half({args[0]});",
                        f"v_f32 {s.vars[0]} = join_halves({a.var}l, {a.var}h);"]
            return [f"v_f32 {s.vars[0]} = scansum_f32({args[0]}), {s.vars[0]}c = splat_f32((float){a.var});",
                    f"{a.var} += {s.vars[0]}[W - 1]; {s.vars[0]} += {s.vars[0]}c;"]
        if not s.along:
            return [f"{a.var} = {self.combine(a.monoid, d, a.var, args[0])};", f"{v} {s.vars[0]} = {a.var};"]
        total = self.combine(a.monoid, d, a.var, f"scan{a.monoid}_{d}({args[0]})")
        return [f"{v} {s.vars[0]} = {total};", f"{a.var} = splat_{d}({s.vars[0]}[W - 1]);"]

    @staticmethod
    def _log_prefix(s: Prefix, a: str, var: str, arg: str) -> list[str]:
        """A prefix of logsumexp: lanes by themselves carry the largest so far and a sum of exponentials below it, in f64; along lanes the carry is
        an f64, to which each register adds its last."""
        if s.along:
            return [f"v_f32 {var} = scanlogsumexp_f32({arg}), {var}c = splat_f32((float){a});",
                    f"{a} = logaddexp({a}, {var}[W - 1]); {var} = logaddexp_f32({var}, {var}c);"]
        return [f"v_f32 {var}m = clip_f32(max_f32({a}, {arg}), -{LARGEST}, {LARGEST});",
                f"v_f32 {var}s = exp_f32({a} - {var}m), {var}e = exp_f32({arg} - {var}m);",
                f"{a} = {var}m; {a}l = {a}l * lower_half({var}s) + lower_half({var}e); {a}h = {a}h * upper_half({var}s) + upper_half({var}e);",
                f"v_f32 {var} = {a} + log_f32(join_halves({a}l, {a}h));"]
