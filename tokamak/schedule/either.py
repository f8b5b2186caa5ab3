"""Of two loads from one memory, between which a coordinate chooses, one: halves that change places (`torch.cat((-b, a))` of `a, b = x.chunk(2)`), or
rolled, are read at a place that the coordinate chooses, and once."""
from __future__ import annotations

from ..ir.expr import Const, Coord, Expr, Load, Op, Rewriter, walk
from ..ir.index import Index, as_index
from ..ir.normal import floordiv
from ..ir.ranges import bounds
from .body import Body, exprs_of, renamed

WORD = 4                # elements whose multiple the place is where the condition changes: GEGLU's backward of two halves of 8191 f32 69.4 us as two
                        # loads, 76.7 as one that is read element by element (H200)
OTHERWISE = {"lt": "ge", "ge": "lt"}


def joined(b: Body) -> Body:
    """`b` with such pairs of loads as one."""
    if not any(isinstance(e, Op) and e.name == "where" for e in walk(*exprs_of(b))):
        return b
    return renamed(b, Rewriter(leaf=_joined), {})


def _joined(e: Expr) -> Expr | None:
    """`e`, where it is such a choice, with one load for each pair, which gives what each gave wherever its condition holds: nobody asks elsewhere."""
    behind = _behind(e.args[0]) if isinstance(e, Op) and e.name == "where" else None
    if behind is None:
        return None
    condition, yes, no = e.args
    other = Op(OTHERWISE[condition.name], *condition.args)
    first = [x for x in walk(yes) if isinstance(x, Load) and x.guard is condition]
    second = [x for x in walk(no) if isinstance(x, Load) and x.guard is other]
    if condition.name == "ge":
        behind = 1 - behind
    made: dict = {}
    for x in first:
        for y in second:
            step = y.index[0] - x.index[0] if x.node is y.node and len(x.index) == len(y.index) == 1 else None
            if step is not None and step.constant is not None and x not in made and y not in made:
                made[x] = made[y] = Load(x.node, (x.index[0] + step * behind,))
    if not made:
        return None
    replaced = Rewriter(leaf=made.get)
    return Op("where", condition, replaced(yes), replaced(no))


def _behind(condition: Expr) -> Index | None:
    """0 before, and 1 from the number on that the coordinate of `condition` is compared with."""
    if not isinstance(condition, Op) or condition.name not in OTHERWISE or not isinstance(condition.args[0], Coord) \
            or not isinstance(condition.args[1], Const) or condition.args[0].index.fetched():
        return None
    i, n = condition.args[0].index, condition.args[1].value
    low, high = bounds(i)
    if low is None or high is None or low.constant is None or high.constant is None or not low.constant < n <= high.constant or n % WORD:
        return None
    # both parts as long as the longer one, so that dividing by its length counts the parts
    longer = max(n - low.constant, high.constant + 1 - n)
    return floordiv(i + (longer - n), as_index(longer))
