"""Text of the language: printer and parser (round trip). See print_graph, parse_graph."""
from __future__ import annotations


def print_expr(e) -> str:
    """One-line text of an expression."""
    name = type(e).__name__
    if name == "Load":
        guard = f" if {print_expr(e.guard)} else {e.other.value}" if e.guard is not None else ""
        return f"{getattr(e.node, 'name', type(e.node).__name__.lower())}[{', '.join(map(repr, e.index))}{guard}]"
    if name == "Const":
        return f"{e.value}:{e.dtype}"
    if name == "Scalar":
        return f"${e.argument}"
    if name == "Coord":
        return f"coord({e.index!r})"
    if name == "Op":
        return f"{e.name}({', '.join(map(print_expr, e.args))})"
    if name == "Cast":
        return f"{e.dtype}{'~' if e.implicit else ''}({print_expr(e.arg)})"
    if name == "Reduce":
        return f"{e.monoid}.{e.component}[{', '.join(f'{a!r}<{a.extent!r}' for a in e.over)}]({', '.join(map(print_expr, e.args))})"
    if name == "Scan":
        return f"scan_{e.monoid}.{e.component}[{e.along!r}{' reverse' if e.reverse else ''}]({', '.join(map(print_expr, e.args))})"
    return f"{e.kind}({print_expr(e.seed)}, {print_expr(e.offset)}, {e.index!r})"
