"""Atomic axes: one set of coordinates for all members of a group.

A node's own axes are split where its indices divide them (`split_axes`), and two groups' axes are identified by equations between indices
(`unify`): where one reads what the other makes, or both read the same value, the two index expressions denote one element. Both sides are
mixed-radix numbers; digits are matched from the least significant, the coarser side being split where extents nest. GroupNorm's view to
(N, G, C/G*H*W) and back meets at (n, g, c', h, w) this way. A symbolic axis is split only where the division is exact as polynomials.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import count, permutations
from typing import Iterable

from ..ir.expr import Cast, Expr, Load, Reduce, Rewriter, Scan, loads, walk
from ..ir.graph import Compute, Scatter
from ..ir.index import Axis, FloorDiv, Index, Mod, as_index
from ..ir.normal import divide_exact
from ..ir.ranges import nonnegative
from ..ir.substitution import substitute


@dataclass(frozen=True, eq=False)
class Member:
    """A node placed in a group: `dims[d]` is dimension d of the node (of its domain, for a Scatter) over the group's axes."""
    node: Compute | Scatter
    dims: tuple[Index, ...]
    expr: Expr                                 # a Scatter's value
    index: tuple[Index, ...] = ()              # a Scatter's index
    guard: Expr | None = None

    @cached_property
    def free(self) -> frozenset[Axis]:
        """The group axes that the member's dimensions run over."""
        return frozenset().union(*(d.axes() for d in self.dims))

    @cached_property
    def bound(self) -> frozenset[Axis]:
        """The group axes folded at the member's root."""
        f = fold_of(self.expr)
        return frozenset(f.over) if isinstance(f, Reduce) else frozenset()

    def roots(self) -> tuple[Expr, ...]:
        return (self.expr, *((self.guard,) if self.guard is not None else ()))

    @cached_property
    def loads(self) -> tuple[Load, ...]:
        """Every load in the member's expressions, each once, children before parents."""
        return tuple(loads(*self.roots()))

    @cached_property
    def scanned(self) -> frozenset[Axis]:
        """The group axes along which prefixes are folded."""
        return frozenset(e.along for e in walk(*self.roots()) if isinstance(e, Scan))


@dataclass(frozen=True, eq=False)
class Group:
    """Nodes that share one kernel, in topological order, over common atomic axes. `kind`: the group that this one copies, node for node over the same
    axes (see `alike`)."""
    axes: tuple[Axis, ...]
    members: tuple[Member, ...]
    kind: "Group | None" = None

    def nodes(self) -> tuple:
        return self._nodes

    @cached_property
    def _nodes(self) -> tuple:
        return tuple(m.node for m in self.members)

    @cached_property
    def reads(self) -> dict:
        """Every node that the members load -> do its elements differ along any axis?"""
        found: dict = {}
        for m in self.members:
            for e in m.loads:
                found[e.node] = found.get(e.node, False) or any(i.axes() for i in e.index)
        return found

    @cached_property
    def outside(self) -> tuple[Load, ...]:
        """The loads of what other kernels, or nobody, make."""
        inside = set(self.nodes())
        return tuple(e for m in self.members for e in m.loads if e.node not in inside)


def fold_of(e: Expr):
    """The Reduce or Scan at the root of `e`, under casts; or None."""
    while isinstance(e, Cast):
        e = e.arg
    return e if isinstance(e, (Reduce, Scan)) else None


def bound_axes(roots: Iterable[Expr]) -> list[Axis]:
    """Axes bound by the Reduces in `roots`, in order of appearance."""
    return list(dict.fromkeys(a for e in walk(*roots) if isinstance(e, Reduce) for a in e.over))


def singleton(node, fresh: count) -> Group:
    """The group of one node, on axes of its own with fresh ids, split where its indices divide them."""
    roots = (node.expr,) if isinstance(node, Compute) else (node.value, *((node.guard,) if node.guard is not None else ()))
    own = [a for a in node.axes if a.extent != 1] + bound_axes(roots)
    mapping = {a: as_index(Axis(next(fresh), a.extent)) for a in own}
    dims = tuple(mapping.get(a, as_index(0)) for a in node.axes)
    rewrite = Rewriter(mapping)
    if isinstance(node, Compute):
        member = Member(node, dims, rewrite(node.expr))
    else:
        member = Member(node, dims, rewrite(node.value), tuple(rewrite.index(i) for i in node.index),
                        rewrite(node.guard) if node.guard is not None else None)
    return split_axes(Group(tuple(m.atoms()[0] for m in mapping.values()), (member,)), fresh)


def remap(group: Group, mapping: dict[Axis, Index]) -> Group:
    """`group` with axes replaced (renamed or split into digits)."""
    if not mapping:
        return group
    rewrite = Rewriter(mapping)
    members = tuple(Member(m.node, tuple(rewrite.index(d) for d in m.dims), rewrite(m.expr), tuple(rewrite.index(i) for i in m.index),
                           rewrite(m.guard) if m.guard is not None else None) for m in group.members)
    axes: dict = {}
    for a in group.axes:
        axes.update((x, None) for x in digits_of(mapping[a])) if a in mapping else axes.setdefault(a, None)
    return Group(tuple(axes), members)


def as_one(members: Iterable[Member], axes: frozenset[Axis]) -> bool:
    """Do all accesses of `members` go through `axes`, several, in step, so that a kernel counts them as one?"""
    lie = lambda index, node: sum((i * s for i, s in zip(index, node.strides)), as_index(0))
    found = [lie(*x) for m in members for x in (*((e.index, e.node) for e in m.loads), (m.dims, m.node))]
    used = [i for i in found if axes & set(i.axes())]
    whole = lambda order, i: all(i.coefficient(b).terms and i.coefficient(a) is i.coefficient(b) * b.extent for a, b in zip(order, order[1:]))
    plain = all(axes <= {a for a in i.atoms() if isinstance(a, Axis)} for i in used)
    return plain and any(all(whole(order, i) for i in used) for order in permutations(axes))


def digits_of(i: Index) -> list[Axis]:
    """The axes of a mixed-radix index, most significant first."""
    found = digits(i)
    if found is None:
        raise TypeError(f"{i!r} is no mixed-radix number")
    return [a for a in reversed(found)]


@lru_cache(maxsize=65536)
def digits(i: Index) -> tuple[Axis, ...] | None:
    """`i` as a mixed-radix number: its axes from the least significant (weight 1, then 1 * extent, ...); None when it is none."""
    left, weight = i, as_index(1)
    out: list[Axis] = []
    while left.terms:
        found = next((a for a in left.atoms() if isinstance(a, Axis) and left.coefficient(a) is weight), None)
        if found is None or any(k.count(found) > 1 for k in left.terms):
            return None
        out.append(found)
        weight = weight * found.extent
        left = left.without(found)
    return tuple(out)


# -- splitting -----------------------------------------------------------------------------------------------------
def _indices(roots: Iterable[Expr]) -> list[Index]:
    from ..ir.expr import Coord, Random
    found: list[Index] = []
    for e in walk(*roots):
        if isinstance(e, Load):
            found.extend(e.index)
        elif isinstance(e, (Coord, Random)):
            found.append(e.index)
    return found


def _divisions(i: Index, found: dict) -> None:
    for a in i.atoms():
        if isinstance(a, Axis):
            continue
        if isinstance(a, (FloorDiv, Mod)):
            found[(a.a, a.b)] = None
            _divisions(a.a, found)
        elif hasattr(a, "b") and hasattr(a, "a"):
            _divisions(a.a, found)
            _divisions(a.b, found)


def split_axes(group: Group, fresh: count) -> Group:
    """Splits axes so that divisions in indices go away, where extents divide exactly. Axes that a scan runs along stay whole."""
    for _ in range(32):
        roots = [r for m in group.members for r in m.roots()]
        found: dict = {}
        for i in _indices(roots) + [i for m in group.members for i in m.index]:
            _divisions(i, found)
        scanned = frozenset().union(*(m.scanned for m in group.members)) if found else ()
        for (x, d) in found:
            split = _split_for(x, d, scanned)
            if split is not None:
                a, low = split
                high = divide_exact(a.extent, low)
                group = remap(group, {a: as_index(Axis(next(fresh), high)) * low + as_index(Axis(next(fresh), low))})
                break
        else:
            return group
    return group


def _split_for(x: Index, d: Index, scanned) -> tuple[Axis, Index] | None:
    for a in x.atoms():
        if not isinstance(a, Axis) or a in scanned:
            continue
        c = x.coefficient(a)
        k = divide_exact(d, c) if c.terms else None
        if k is None or k == 1 or not nonnegative(k - 1):
            continue
        high = divide_exact(a.extent, k)
        if high is not None and high != 1:
            return a, k
    return None


# -- unifying ------------------------------------------------------------------------------------------------------
class Unifier:
    """Identifies axes of group `b` with axes of group `a`. `equate` takes one equation; `mapping_a`, `mapping_b` are the substitutions found."""

    def __init__(self, a: Group, b: Group, fresh: count):
        self.fresh = fresh
        self.mapping_a: dict[Axis, Index] = {}        # splits of a's axes
        self.mapping_b: dict[Axis, Index] = {}        # b's axes: splits, and what they are in a
        self.joined: dict[Axis, Axis] = {}            # axis of b -> axis of a
        self.taken: set[Axis] = set()
        self.groups = (a, b)
        self.scanned = frozenset().union(*(m.scanned for g in (a, b) for m in g.members))

    def equate(self, ia: Index, ib: Index) -> bool:
        """True when both denote the same element from now on; False (nothing changed) when they cannot."""
        saved = (dict(self.mapping_a), dict(self.mapping_b), dict(self.joined), set(self.taken))
        if self._equate(ia, ib):
            return True
        self.mapping_a, self.mapping_b, self.joined, self.taken = saved
        return False

    def follow(self, ia: Index, ib: Index) -> bool:
        """As `equate`, of what two groups read of one memory: also where the elements are those of two windows, or of two places of one, that move on
        by the same steps. Then both run along the same axes, though the elements that they read at once are not the same."""
        if self.equate(ia, ib):
            return True
        steps_a, steps_b = (_steps(_closure(i, m)) for i, m in ((ia, self.mapping_a), (ib, self.mapping_b)))
        if not steps_a or not steps_b or steps_a.keys() != steps_b.keys():
            return False
        pairs = [(x, steps_b[step]) for step, x in steps_a.items()]
        fits = lambda x, y: self.joined.get(y) is x or (y not in self.joined and x not in self.taken and x.extent is y.extent)
        if not all(fits(x, y) for x, y in pairs):
            return False
        for x, y in pairs:
            self._join(x, y)
        return True

    def _equate(self, ia: Index, ib: Index) -> bool:
        da, db = digits(_closure(ia, self.mapping_a)), digits(_closure(ib, self.mapping_b))
        if da is None or db is None:
            return False
        da, db = list(da), list(db)
        while da and db:
            x, y = da.pop(0), db.pop(0)
            if self.joined.get(y) is x:
                continue
            if y in self.joined:                       # y is another axis of a: the same one, if no member of a needs both
                if not self._merge(0, x, self.joined[y], self.mapping_a):
                    return False
                continue
            if x in self.taken:                        # x is another axis of b: likewise
                if not self._merge(1, y, next(k for k, v in self.joined.items() if v is x), self.mapping_b):
                    return False
                continue
            if x.extent is y.extent:
                self._join(x, y)
                continue
            rest = divide_exact(x.extent, y.extent)
            if rest is not None and x not in self.scanned and nonnegative(rest - 2):
                low, high = self._split(x, y.extent, rest, self.mapping_a)
                self._join(low, y)
                da.insert(0, high)
                continue
            rest = divide_exact(y.extent, x.extent)
            if rest is not None and y not in self.scanned and nonnegative(rest - 2):
                low, high = self._split(y, x.extent, rest, self.mapping_b)
                self._join(x, low)
                db.insert(0, high)
                continue
            return False
        return not da and not db

    def _merge(self, side: int, gone: Axis, kept: Axis, mapping) -> bool:
        """Makes `gone` and `kept`, two axes of one group, the same axis."""
        if gone.extent is not kept.extent or gone in self.scanned or kept in self.scanned:
            return False
        for m in self.groups[side].members:
            used = {x for a in _axes_of(m) for x in _closure(as_index(a), mapping).axes()}
            if gone in used and kept in used:
                return False
        partners = [y for y, x in self.joined.items() if (x if side == 0 else y) is gone]
        if partners:
            return False
        mapping[gone] = as_index(kept)
        return True

    def _join(self, x: Axis, y: Axis) -> None:
        self.joined[y] = x
        self.taken.add(x)

    def _split(self, axis: Axis, low: Index, high: Index, mapping) -> tuple[Axis, Axis]:
        lo, hi = Axis(next(self.fresh), low), Axis(next(self.fresh), high)
        mapping[axis] = as_index(hi) * low + as_index(lo)
        return lo, hi

    def result(self, a: Group, b: Group) -> Group:
        """Both groups as one, `a`'s members first (the caller orders them)."""
        a = remap(a, {x: _closure(as_index(x), self.mapping_a) for x in a.axes if x in self.mapping_a})
        renames = {**self.mapping_b, **{y: as_index(x) for y, x in self.joined.items()}}
        b = remap(b, {y: self._resolve(y, renames) for y in b.axes if y in renames})
        axes = dict.fromkeys((*a.axes, *b.axes))
        return Group(tuple(axes), a.members + b.members)

    def _resolve(self, y: Axis, renames) -> Index:
        full = _closure(as_index(y), renames)
        return _closure(full, self.mapping_a)


def _steps(i: Index) -> dict[int, Axis] | None:
    """Step -> the axis that it belongs to, of a sum of axes times different constants (and a constant); None of another index."""
    found: dict[int, Axis] = {}
    for atoms, step in i.terms.items():
        if len(atoms) > 1 or any(not isinstance(a, Axis) for a in atoms) or (atoms and step in found):
            return None
        found.update((step, a) for a in atoms)
    return found


def _axes_of(m: Member) -> set[Axis]:
    """Every axis that a member runs over: its dimensions' and all that are bound in its expressions."""
    return set(m.free) | set(bound_axes(m.roots())) | {a for r in m.roots() for a in r.free}


def _closure(i: Index, mapping) -> Index:
    """`i` with `mapping` applied until nothing changes, in the expressions that it fetches too."""
    while any(a in mapping for a in i.axes()):
        i = substitute(i, mapping, Rewriter(mapping))
    return i
