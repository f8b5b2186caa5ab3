"""Which stored values are cheaper computed again by the kernels that read them.

A pointwise value that a kernel stores only for other kernels costs a write and a read of each of those. Computing it again costs what its own
operands cost to read there (nothing where the reader reads them anyway, little where it only gathers), memory for operands that had none,
and arithmetic. On a GPU all that one kernel stores for others is also weighed as a whole, made again from what that kernel itself reads: of a chain
no single value may pay.
"""
from __future__ import annotations

from ..ir.expr import Load, Random, Reduce, walk, loads
from ..ir.graph import Compute, Input, Opaque, Result, is_pointwise
from ..ir.index import Fetch
from .axes import Group, fold_of
from .contraction import contraction, multiplied
from .cost import Hints, is_heavy, node_bytes, pinned_nodes, weight

FLOPS_A_BYTE = 4        # arithmetic that takes as long as moving a byte, a core's share of the memory bandwidth taken
FLOPS_A_BYTE_GPU = 12   # the same of a GPU
LAUNCH = 4 << 20        # bytes that a GPU moves in the time that a kernel of its own takes to start and to end, a microsecond
RUN = 1024              # elements side by side that a program of a pointwise kernel has about, and shares what they have in common. One number of
                        # each of 71 rows made by itself before the gradient of cross entropy over 65536 columns: 23.0 of 29.6 us
HIDDEN = 8              # of the bytes that a GPU's pointwise kernel writes, that arithmetic may take the time of beside them
NEAR = 4                # bytes that a GPU reads from a cache near by in the time of one from memory
CHEAP = 4               # operations of a value that is made again for each column,
COLUMNS = 64            # of which there are as many as a tile has: means of 1271 x 20 x 2322 bf16 under a mask 106 us, 40.8 so, of
                        # 6958 x 4 x 1112 f16 50.8, 27.4, softmax along the middle under one, of 11 x 3136 x 511 bf16, 164, 77.0; but means of
                        # 3 x 255 x 4933 f16 9.1, 11.5 (H200)
LARGEST_DOMAIN = 1.01   # readers that use an element more than once compute it more than once: not worth it


def recomputed(plan, hints: Hints, target) -> frozenset:
    """Pairs (producer, reader) for which computing again moves fewer bytes. What a moved value is computed from stays stored: each sum of a chain (a
    residual stream) read in the place of the one before would make the last kernel read every term."""
    graph = plan.graph
    fixed = pinned_nodes(graph)
    owner = {n: g for g in plan.steps if isinstance(g, Group) for n in g.nodes()}
    stored = {n for nodes in plan.stores.values() for n in nodes}
    readers: dict = {}
    for g in plan.steps:
        for m in g.members if isinstance(g, Group) else ():
            for e in _loads(m.node):
                readers.setdefault(e.node, []).append((m.node, e))
    outside = {p: found for p, g in owner.items() if p in stored and p not in fixed and is_pointwise(p)
               if (found := [(n, e) for n, e in readers.get(p, ()) if owner[n] is not g])}
    found, moved, kept = set(), set(), set()
    for g in plan.steps if target.kind == "gpu" and not target.ordered else ():
        for p in _in_the_way(g, fixed, hints) if isinstance(g, Group) else ():
            found.update((p, n) for n, _ in readers.get(p, ()))
            moved.add(p)
            kept |= {e.node for e in _loads(p)}
        whole = lambda p: p in outside and p not in kept and not any(_again(n, e, hints) for n, e in outside[p])
        values = {p: outside[p] for p in plan.stores[g] if whole(p)} if isinstance(g, Group) else {}
        made = (_in_parts(values, g, plan.stores[g], owner, hints) or _as_a_whole(values, g, owner, stored, fixed, hints)) if values else None
        if made is not None and not made[1] & moved:
            found |= made[0]
            moved.update(values)
            kept |= made[1]
    for p, into in outside.items():
        operands = {e.node for e in _loads(p)}
        alone = target.kind == "gpu" and not target.ordered and len(owner[p].members) == 1 and not any(_multiplies(n) for n, _ in into)
        if p not in moved and p not in kept and not operands & moved and _cheaper(p, into, owner, stored, hints, target.kind == "cpu", alone):
            found.update((p, n) for n, _ in into)
            moved.add(p)
            kept |= operands
    return frozenset(found)


def _in_the_way(g: Group, fixed, hints: Hints) -> list[Compute]:
    """Values of `g`, cheap, for which it runs in parallel along nothing but their axes, though columns that they lack could be folded each by itself:
    a mask of positions keeps all columns of a row in one program, or leaves sums along them to be folded on."""
    folds = [m for m in g.members if m.bound and not _multiplies(m.node)]           # tiles are multiplied as they lie in memory
    drawn = lambda m: any(isinstance(e, Random) for e in walk(m.expr))
    cheap = lambda m: is_pointwise(m.node) and m.node not in fixed and weight(m.expr) <= CHEAP and not is_heavy(m.expr) and not drawn(m)
    return [p.node for p in g.members if cheap(p) and any(m.bound & p.free and hints.count(m.free - p.free) >= COLUMNS for m in folds)]


def _multiplies(n) -> bool:
    """Does `n` multiply tiles, of which each is read again and again?"""
    return isinstance(n, Compute) and (c := contraction(fold_of(n.expr))) is not None and multiplied(c)


def _as_a_whole(values: dict, g: Group, owner, stored, fixed, hints: Hints) -> tuple[set, set] | None:
    """(pairs, what then has to stay stored) where the readers of all `values`, which the kernel of `g` stores for other kernels, had better compute
    them again from what that kernel reads; else None. `values`: value -> its (reader, load) outside."""
    pairs, leaves, before, after = set(), set(), sum(node_bytes(p, hints) for p in values), 0.0
    inside = lambda q: q in values or owner.get(q) is g and q not in stored and q not in fixed and is_pointwise(q)
    for h in dict.fromkeys(owner[n] for into in values.values() for n, _ in into):
        have = {x.node for m in h.members for x in _loads(m.node)} - values.keys()
        read, touched = [p for p, into in values.items() if any(owner[n] is h for n, _ in into)], 0
        for p in read:
            for n, e in (x for x in values[p] if owner[x[0]] is h):
                touched = max(touched, _accessed(e, hints))
                before += _accessed(e, hints) * p.dtype.bytes
                pairs.add((p, n))
        for p in read:                      # grows
            if any(isinstance(x, Random) for x in walk(p.expr)):
                return None
            after += touched * weight(p.expr) / FLOPS_A_BYTE_GPU
            for e in _loads(p):
                if inside(e.node):
                    pairs.add((e.node, p))
                    read += [e.node] if e.node not in read else []
                elif e.node not in have:
                    if e.node not in stored and not isinstance(e.node, (Input, Result, Opaque)):
                        if owner.get(e.node) is not g or is_pointwise(e.node):
                            return None
                        after += node_bytes(e.node, hints)          # a fold of that kernel's, which may have to be stored then
                    after += min(touched, hints.count(e.free)) * e.dtype.bytes
                    have.add(e.node)
                leaves |= {e.node} - set(read)
    return (pairs, leaves) if after < before else None


def _in_parts(values: dict, g: Group, stores, owner, hints: Hints) -> tuple[set, set] | None:
    """The same where `g` stores nothing but what one pointwise kernel puts side by side (`cat` of gradients): that makes all parts for each element,
    and reads what is part of it, while the next bytes are on their way. None where the arithmetic takes longer than what both kernels move."""
    into = [x for found in values.values() for x in found]
    side, reader = dict.fromkeys(n for n, _ in into), owner.get(into[0][0])
    parts = all(e.guard is not None and owner.get(n) is reader for n, e in into) and all(len(x) == 1 for x in values.values())
    if reader is None or not parts or set(values) != set(stores) or not all(is_pointwise(m.node) for m in (*g.members, *reader.members)) \
            or any(isinstance(x, Random) for m in g.members for x in walk(m.expr)):
        return None
    pairs, leaves, flops, read, before = {(p, n) for p, ((n, _),) in values.items()}, set(), 0, 0.0, {}
    for p in values:
        made, touched = [p], {}
        for q in made:                      # grows
            flops += weight(q.expr)
            for e in _loads(q):
                if owner.get(e.node) is g and e.node not in values:
                    pairs.add((e.node, q))
                    made += [e.node] if e.node not in made else []
                else:
                    touched[e.node, e.index] = hints.count(e.free) * e.dtype.bytes
                    leaves.add(e.node)
        read += sum(touched.values())
        before.update(touched)
    if leaves & set(values):
        return None
    written = sum(node_bytes(n, hints) for n in side)
    moved, arithmetic = read + written, sum(_domain(n, hints) for n in side) * flops / FLOPS_A_BYTE_GPU
    apart = sum(before.values()) + 2 * sum(node_bytes(p, hints) for p in values) + written + LAUNCH
    return (pairs, leaves) if max(moved, arithmetic) < apart else None


def _loads(node) -> list[Load]:
    roots = (node.expr,) if isinstance(node, Compute) else (node.value,)
    return loads(*roots)


def _again(n, e: Load, hints: Hints) -> bool:
    """Would `n`, which reads `e`, make elements of it more than once?"""
    return isinstance(n, Compute) and _domain(n, hints) > _accessed(e, hints) * LARGEST_DOMAIN


def _accessed(e: Load, hints: Hints) -> int:
    """How many elements a load touches, each coordinate of the axes it depends on counted once."""
    return hints.count(e.free)


def _cheaper(p: Compute, outside, owner, stored, hints: Hints, cpu: bool, alone: bool) -> bool:
    """Is `p` cheaper computed again by its readers `outside`? On a CPU not where they read its elements several times, in windows that overlap.
    `alone`: it is all that a kernel for a GPU makes."""
    keep = node_bytes(p, hints) + (LAUNCH if alone else 0)
    again = 0.0
    flops = weight(p.expr)
    operands = loads(p.expr)
    for n, e in outside:
        touched = _accessed(e, hints)
        keep += touched * p.dtype.bytes
        if alone and (programs := _along_rows(n, e, hints)):
            again += programs * (flops / FLOPS_A_BYTE_GPU + sum(x.dtype.bytes for x in operands))
            continue
        if alone and is_pointwise(n) and not _by_lanes(p, n, e):
            more = max(0, sum(x.dtype.bytes for x in operands if x.free >= p.expr.free) - p.dtype.bytes)
            each = _domain(n, hints) // (1 if e.free else RUN) * (flops / FLOPS_A_BYTE_GPU + more / NEAR)
            again += max(0.0, each - hints.extents(n.shape) * n.dtype.bytes / HIDDEN)
            continue
        apart = min(touched, hints.extents(p.shape)) if cpu else touched
        if isinstance(n, Compute) and _domain(n, hints) > apart * LARGEST_DOMAIN and (flops or _by_lanes(p, n, e)):
            return False
        have = {x.node for m in owner[n].members for x in _loads(m.node)}
        again += touched * flops / FLOPS_A_BYTE
        for x in operands:
            if x.node not in have:
                again += min(touched, hints.count(x.free)) * x.dtype.bytes
    for x in operands:
        if x.node not in stored and not isinstance(x.node, (Input, Result, Opaque)):
            again += node_bytes(x.node, hints)
    return again < keep


def _along_rows(n: Compute, e: Load, hints: Hints) -> int:
    """How many times the programs of pointwise `n` make what it reads by `e`, where that is one value for a long run of elements; or 0."""
    fast = [a for a, s in zip(n.axes, n.strides) if s == 1] if is_pointwise(n) else []
    return hints.extents(n.shape) // RUN if fast and not e.free & set(fast) and hints(fast[-1].extent) >= RUN else 0


def _by_lanes(p: Compute, n: Compute, e: Load) -> bool:
    """Would `n` gather `p`, which it reads by `e`, lane by lane, where an index from memory says?"""
    fetched = {a for x in loads(p.expr) for i in x.index for f in i.atoms() if isinstance(f, Fetch) for a in f.expr.free}
    fast = {a for a, s in zip(n.axes, n.strides) if s == 1}
    return any(a in fetched and i.axes() & fast for a, i in zip(p.axes, e.index))


def _domain(n: Compute, hints: Hints) -> int:
    bound = {a for e in walk(n.expr) if isinstance(e, Reduce) for a in e.over}
    return hints.count((*n.axes, *bound))
