"""C fragments: functions of f64."""
from __future__ import annotations

from .c_math import by_lanes


def fragments(lanes: int) -> dict[str, str]:
    """Fragment name -> C text."""
    one = "exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf erfc".split()
    out = {f"{n}_f64": by_lanes(n, n, "f64") for n in one}
    out |= {f"{n}_f64": by_lanes(n, n, "f64", 2) for n in ("pow", "atan2", "hypot")}
    out["sigmoid_f64"] = "TK v_f64 sigmoid_f64(v_f64 x) { return 1.0 / (1.0 + exp_f64(-x)); }"
    return out
