"""FX graph of aten calls -> Graph.

Every call with a table entry becomes nodes of the language; every other one an Opaque call with its reason. The graph that AOTAutograd traced is
exactly what eager runs (no decomposition before us), so each value's traced strides are eager's, and they become part of the value.
"""
from __future__ import annotations

import operator
from typing import Any, Sequence

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from ..errors import InternalError
from ..ir.dtype import BOOL, F64
from ..ir.expr import Expr, Load, Scalar, walk
from ..ir.graph import Graph, Input, Opaque, Result, View, Write, topological
from ..ir.index import Index, as_index, axis
from ..ir.ops import NotTaken
from .builder import Builder, Spec
from .dtypes import to_dtype
from .hosted import hosted
from .origins import origin
from .regions import Regions, aliases, storage_of
from .registry import MEANINGS, NO_KERNEL, TABLE, NotCompiled
from .scalars import kernelless, refused
from .sizes import Sizes
from .tensor import Tensor, cast, laid_out, overlapping, relaid, strided


def _of_the_run(val) -> str:
    """Says so where a number is made of a size that only the run shows (how many elements of a mask are true)."""
    names = sorted(map(str, free_unbacked_symbols(val)))
    return f"a size that only the run shows: {', '.join(names)}" if names else ""


class Unsupported(Exception):
    """The whole graph must run through torch (a mutation that is no plain copy_ into an input, a layout that is not strided)."""


class Capture:
    """Reads one FX graph. `graph()` is the result. `table` maps aten overloads to builders: all that are registered unless it is given ({}: every
    call opaque)."""

    def __init__(self, gm: fx.GraphModule, policy: str = "fast", name: str = "graph", table: dict | None = None):
        self.gm = gm
        self.table = TABLE if table is None else table
        self.name = name
        self.sizes = Sizes()
        self.b = Builder(self.sizes, policy)
        self.regions = Regions(gm, policy)
        self.policies = self.regions.all
        self.env: dict[fx.Node, Any] = {}
        self.inputs: list = []
        self.constants: dict[Input, torch.Tensor] = {}
        self.storages: dict[Input, int] = {}       # whose memory an output may share
        self.shown: dict[Result, int] = {}         # a view that torch makes -> whose memory it shows
        self.writes: list[Write] = []
        self.origins: dict = {}
        self.opaques = self.b.opaques
        self.fake: dict[fx.Node, Any] = {}
        self.numbers: dict[fx.Node, str] = {}      # of the host that are no sizes -> their names
        self.known: dict[tuple, Spec] = {}         # of traced tensors of constant sizes

    def graph(self) -> Graph:
        outputs: tuple = ()
        self._bind_sizes()
        for node in self.gm.graph.nodes:
            if node.op == "placeholder":
                self.env[node] = self._placeholder(node)
            elif node.op == "get_attr":
                self.env[node] = self._attribute(node)
            elif node.op == "call_function":
                self.b.policy, self.b.rounds = self.regions.policy[node], node in self.regions.rounds
                self.env[node] = self._call(node)
            elif node.op == "output":
                outputs = self._outputs(node.args[0], node.meta.get("views", {}))
            else:
                raise Unsupported(f"an FX node of kind '{node.op}'")
        roots: list = [*self.opaques, *(o.node for o in outputs if isinstance(o, View)), *(w.source.node for w in self.writes)]
        order = topological(roots)
        given = [i for i in self.inputs if isinstance(i, Input)]
        nodes = (*given, *self.constants, *(n for n in order if not isinstance(n, Input)))
        origins = {n: self.origins[n] for n in nodes if n in self.origins}
        return Graph(tuple(self.inputs), nodes, outputs, tuple(self.writes), origins, dict(self.sizes.host), dict(self.sizes.hints), self.name)

    def _bind_sizes(self) -> None:
        """A symbol may reach a graph only inside an expression (a saved s0*s1): that expression is then a size of its own."""
        known: set = set()
        composite: dict = {}
        for node in self.gm.graph.nodes:
            val = node.meta.get("val") if node.op == "placeholder" else None
            for s in (val,) if isinstance(val, torch.SymInt) else val.shape if isinstance(val, torch.Tensor) else ():
                if isinstance(s, torch.SymInt) and s.node.expr.is_symbol:
                    known.add(s.node.expr)
                elif isinstance(s, torch.SymInt):
                    text = node.name if s is val else None
                    composite[s.node.expr] = composite.get(s.node.expr, (None,))[0] or text, s.node.hint
        for expr, (text, hint) in composite.items():
            if expr.free_symbols - known:
                self.sizes.bind(expr, text, hint)

    # -- values of the traced program --------------------------------------------------------------------------------
    def spec(self, val: torch.Tensor) -> Spec:
        if val.layout is not torch.strided or val.is_quantized:
            raise Unsupported(f"a tensor with layout {val.layout}")
        shape, strides, index = val.shape, val.stride(), self.sizes.index
        plain = all([s.__class__ is int for s in (*shape, *strides)])
        key = (shape, strides, val.dtype, val.device)
        found = self.known.get(key) if plain else None
        if found is None:
            found = Spec(tuple([index(s) for s in shape]), tuple([index(s) for s in strides]), to_dtype(val.dtype), str(val.device))
            if plain:
                self.known[key] = found
        return found

    def _specs(self, val) -> tuple:
        vals = val if isinstance(val, (tuple, list)) else (val,)
        return tuple(self.spec(v) if isinstance(v, torch.Tensor) else None for v in vals)

    def _placeholder(self, node: fx.Node):
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor):
            s = self.spec(val)
            made = Input(node.name, s.shape, s.strides, s.dtype, s.device)
            self.inputs.append(made)
            self.storages[made] = val.untyped_storage()._cdata
            self._note(made, node)
            return self._identity(made)
        self.inputs.append(node.name)
        if isinstance(val, torch.SymInt):
            found = self.sizes.index(val)
            if val.node.expr.is_symbol:
                self.sizes.host.setdefault(str(val.node.expr), node.name)
            return found
        if isinstance(val, (torch.SymFloat, torch.SymBool)):
            self.numbers[node] = node.name
            return Scalar(node.name, F64 if isinstance(val, torch.SymFloat) else BOOL)
        if isinstance(val, (int, float, bool)) or val is None:
            return val
        return node          # anything else (a generator, a script object): only opaque calls can use it

    def _attribute(self, node: fx.Node):
        found = self.gm
        for part in node.target.split("."):
            found = getattr(found, part)
        if isinstance(found, torch.Tensor):
            s = self.spec(found)
            made = Input(f"constant_{node.name}", s.shape, s.strides, s.dtype, s.device)
            self.constants[made] = found
            return self._identity(made)
        return found

    def _identity(self, node) -> Tensor:
        return Tensor(node.shape, Load(node, tuple(axis(i, s) for i, s in enumerate(node.shape))), node.device)

    # -- calls --------------------------------------------------------------------------------------------------------
    def _call(self, node: fx.Node):
        target = node.target
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self.env[n])
        val = node.meta["val"] if "val" in node.meta else _parts(node)
        if target is operator.getitem:
            return args[0][args[1]]
        if not isinstance(target, torch._ops.OperatorBase):
            return self._host(node, target, args, kwargs, val)
        if target is torch.ops.aten.copy_.default:
            return self._copy(node, args)
        if isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable and target is not torch.ops.aten.copy_.default:
            raise Unsupported(f"{target} writes into its arguments")
        if isinstance(val, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)):
            if isinstance(val, (int, torch.SymInt)) and not isinstance(val, bool) and target in _SIZE_CALLS:
                return self.sizes.index(val)
            return self._opaque(node, target, args, kwargs, val, "it returns a number to the host")
        specs = self._specs(val)
        build = self.table.get(target)
        reason = "" if build else NO_KERNEL if self.table else "the option opaque_only leaves every operator to torch"
        if build and any(s is not None and s.dtype.kind == "x" for s in specs) or build and _foreign((args, kwargs)):
            build, reason = None, "a type the language cannot compute in"
        one = val[0] if isinstance(val, (tuple, list)) and val else val
        if build and isinstance(one, torch.Tensor) and isinstance(target, torch._ops.OpOverload):
            if refused(target, node.args, node.kwargs, one.dtype):
                build, reason = None, "torch refuses a number that does not fit the type"
            elif kernelless(target, node.args, one.dtype):
                build, reason = None, "torch has no kernel for the type"
        if build:
            self.b.specs, self.b.fx = specs, node
            device = specs[0].device if specs and specs[0] is not None else "cpu"
            try:
                made = build(self.b, *hosted(_sized(args), device), **hosted(_sized(kwargs), device))
                return self._adopt(node, made, specs)
            except NotCompiled as why:
                reason = str(why)
            except NotTaken as why:         # torch has no kernel for such a type either, and says so when the call is made
                reason = f"the language has no meaning for the type: {why}"
        how = node.meta.get("layout")
        return self._opaque(node, target, args, kwargs, val, reason if how is None else f"{reason}; {how}")

    def _host(self, node, target, args, kwargs, val):
        """Arithmetic on sizes between calls: torch already knows the result."""
        if isinstance(val, (int, torch.SymInt)) and not isinstance(val, bool):
            return self.sizes.index(val)
        if isinstance(val, (torch.SymFloat, torch.SymBool)):
            name = self.sizes.number(node, self.numbers)
            if name is None:
                raise Unsupported(_of_the_run(val) or f"host arithmetic '{target}' on {type(val).__name__}")
            self.numbers[node] = name
            return Scalar(name, F64 if isinstance(val, torch.SymFloat) else BOOL)
        if isinstance(val, (float, bool)):
            return val
        raise Unsupported(f"a call of {target}")

    def _copy(self, node: fx.Node, args):
        """`copy_` into an input: a Write. AOTAutograd puts these at the end of the graph."""
        target, source = args[0], args[1]
        spot = strided(target) if isinstance(target, Tensor) else None
        whole = spot is not None and spot.shape == spot.node.shape and \
            all(x is y or e == 1 for x, y, e in zip(spot.strides, spot.node.strides, spot.shape))
        if not whole or not isinstance(spot.node, Input):
            raise Unsupported("copy_ into something that is no whole input")
        into = spot.node
        if overlapping(into.shape, into.strides):
            raise Unsupported("copy_ into an input whose elements share memory")
        value = source.expand(into.shape).cast(into.dtype) if source.shape != into.shape or source.dtype is not into.dtype else source
        view = strided(value)
        same = view is not None and all(x is y or e == 1 for x, y, e in zip(view.strides, into.strides, into.shape))
        if not same or view.node is into or isinstance(view.node, Input):
            view = strided(self.b.realize(value, into.strides, tag=-1 - len(self.writes)))
            self._note(view.node, node)
        self.writes.append(Write(into, view))
        return source

    def _adopt(self, node: fx.Node, made, specs):
        """A builder's result, in the traced type and with the traced strides."""
        if isinstance(made, Tensor):
            return self._finish(node, made, specs[0])
        if not isinstance(made, (tuple, list)) or len(made) != len(specs):
            raise InternalError(f"the entry of {node.target} returned {type(made).__name__} for {len(specs)} results")
        return tuple(self._finish(node, m, s) if isinstance(m, Tensor) and s is not None else None for m, s in zip(made, specs))

    def _finish(self, node: fx.Node, t: Tensor, spec: Spec) -> Tensor:
        if t.shape != spec.shape:
            known = lambda x, y: x.constant is not None and y.constant is not None or 1 in (x.constant, y.constant)
            if t.rank != len(spec.shape) or any(x is not y and known(x, y) for x, y in zip(t.shape, spec.shape)):
                raise InternalError(f"the entry of {node.target} gives shape {t.shape}, torch {spec.shape}")
            t = t.view(spec.shape, lambda c: c)     # one size in two forms (C and C // G * G, or a number): torch's guards hold them equal
        expr = cast(t.expr, spec.dtype, implicit=True)
        t = Tensor(t.shape, expr, spec.device)
        if not expr.free and not any(isinstance(e, Load) for e in walk(expr)):
            return t                                # a constant: every reader holds it
        view = strided(t)
        if view is not None and (isinstance(view.node, (Input, Result)) or view.node in self.origins):
            if aliases(node.target) or laid_out(view, spec.strides):
                return t                            # a view of a value that exists already
            t = self.b.realize(t, spec.strides)     # torch copies here (flip, clone): an opaque reader must meet the copy's layout
            self._note_new(t, node)
            return t
        moved = relaid(t, spec.strides, spec.device) if view is not None else None
        if moved is not None:
            t = moved                               # the builder realized it itself: that node gets the traced layout
        else:
            t = self.b.realize(t, spec.strides)
        self._note_new(t, node)
        return t

    def _opaque(self, node, target, args, kwargs, val, reason):
        # a call within a call (of random numbers, say), or a user's kernel, whose results have names
        if isinstance(val, dict) or isinstance(val, (tuple, list)) and any(isinstance(v, (tuple, list)) for v in val):
            leaves, structure = pytree.tree_flatten(val)
            return pytree.tree_unflatten(self._opaque(node, Flat(target), args, kwargs, tuple(leaves), reason), structure)
        traced: dict = {}

        def own(n: fx.Node):
            made = self._own(n)
            if isinstance(made, Tensor) and isinstance(n.meta.get("val"), torch.Tensor):
                traced.setdefault(made, self.spec(n.meta["val"]).strides)
            return made
        if "layout" not in node.meta:           # such images and weights have copies of their own where they need them
            args, kwargs = fx.map_arg((node.args, node.kwargs), own)
        specs = self._specs(val) if not (isinstance(val, (torch.SymInt, torch.SymFloat)) or val is None) else (None,)
        reads: dict = {}

        def leaf(x):
            if not isinstance(x, Tensor):
                return x
            view = strided(x)
            reads[view.node] = None
            return _shown(view, traced[x]) if x in traced else view
        given = _map((args, kwargs), lambda x: self._in_memory(x, node) if isinstance(x, Tensor) else x)
        args, kwargs = _map(given, leaf)
        call = Opaque(target, args, dict(kwargs), specs, not isinstance(val, (tuple, list)), reason, tuple(reads),
                      self._meaning(target, *given, specs))
        self.opaques.append(call)
        self._note(call, node)
        outs = []
        for i, s in enumerate(specs):
            if s is None:
                outs.append(None)
                continue
            r = Result(call, i, s.shape, s.strides, s.dtype, s.device)
            self._note(r, node)
            if aliases(target):
                self.shown[r] = storage_of(val[i] if isinstance(val, (tuple, list)) else val)
            outs.append(self._identity(r))
        if isinstance(val, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise Unsupported(_of_the_run(val) or f"{target} returns a {type(val).__name__}")
        return tuple(outs) if isinstance(val, (tuple, list)) else (outs[0] if outs else None)

    def _own(self, node: fx.Node):
        """What `node` gave, for a call of torch. Memory that torch allocates begins at a multiple of 16 bytes, and libraries count on it (attention
        does): where ours is a view of an input, which may begin anywhere, or begins within another value, it is copied as in eager."""
        t, base = self.env[node], node
        while base.op == "call_function" and (aliases(base.target) or base.target is operator.getitem) and isinstance(base.args[0], fx.Node):
            base = base.args[0]
        view = strided(t) if isinstance(t, Tensor) and base.op == "call_function" else None
        if view is None or "val" not in node.meta or not isinstance(view.node, Input) and (base is not node or view.offset is as_index(0)):
            return t
        self.env[node] = t = self.b.realize(t, self.spec(node.meta["val"]).strides)
        self._note_new(t, node)
        return t

    def _in_memory(self, t: Tensor, node: fx.Node | None) -> Tensor:
        """`t` as a window on memory that torch can be handed."""
        if strided(t) is None:
            t = self.b.realize(t)
            self._note_new(t, node)
        return t

    def _meaning(self, target, args, kwargs, specs) -> Expr | None:
        """What an opaque call computes, where `registry.MEANINGS` can say it."""
        build = MEANINGS.get(target) if self.table else None
        if build is None or len(specs) != 1 or specs[0] is None or specs[0].dtype.kind == "x" or _foreign((args, kwargs)):
            return None
        self.b.specs = specs
        made = build(self.b, *_sized(args), **_sized(kwargs))
        return self.b.rounded(cast(made.expr, specs[0].dtype, implicit=True)) if made is not None and made.shape == specs[0].shape else None

    def _outputs(self, found, views: dict) -> tuple:
        """Outputs in order, with the traced strides. What eager gives memory of its own (not an input's, not another output's) gets a node of its
        own; a constant is the program's, and no output. `views`: position -> (name of an input, a tensor that lies in it as the output does, where
        it begins there)."""
        found = found if isinstance(found, (tuple, list)) else (found,)
        owners: dict = self.storages | self.shown | {c: t.untyped_storage()._cdata for c, t in self.constants.items()}
        bases = self._bases(found)
        out = []
        inputs = {i.name: i for i in self.inputs if isinstance(i, Input)}
        for position, n in enumerate(found):
            value = self.env[n] if isinstance(n, fx.Node) else n
            if not isinstance(value, Tensor):
                out.append(value)
                continue
            if position in views:
                name, val, start = views[position]
                out.append(View(inputs[name], self.spec(val).shape, self.spec(val).strides, self.sizes.index(start)))
                continue
            val = n.meta.get("val")
            view = strided(value)
            storage = storage_of(val)
            if storage in bases:
                out.append(View(bases[storage], self.spec(val).shape, self.spec(val).strides, self.sizes.index(val.storage_offset())))
                continue
            owner = owners.get(view.node) if view is not None else None
            strides = self.spec(val).strides if isinstance(val, torch.Tensor) else None
            moved = view is not None and strides is not None and any(x is not y for x, y, e in zip(view.strides, strides, view.shape) if e != 1)
            if view is None or moved or (owner is not None and storage != owner):
                t = self.b.realize(value, strides, tag=len(out) + 1)
                self._note_new(t, n)
                view = strided(t)
            if storage not in self.storages.values():       # a written input: torch itself returns it
                owners.setdefault(view.node, storage)
            out.append(_shown(view, strides) if isinstance(val, torch.Tensor) else view)
        return tuple(out)

    def _bases(self, found) -> dict:
        """Storage -> a node for it, where several outputs show memory for which capture has made none: a copy of an input, a constant, a value whose
        node an earlier output has taken as its own copy."""
        shown: dict = {}
        owners: dict = {}
        for position, n in enumerate(found):
            if isinstance(n, fx.Node) and isinstance(self.env[n], Tensor):
                view, storage = strided(self.env[n]), storage_of(n.meta.get("val"))
                shown.setdefault(storage, []).append((position, n, view))
                if storage not in self.storages.values():
                    owners.setdefault(view and view.node, storage)
        made = {}
        for storage, outputs in shown.items():
            views = [view for *_, view in outputs]
            lacking = all(v is None or isinstance(v.node, Input) or owners.get(v.node) != storage for v in views)
            if len(outputs) < 2 or storage in (None, *self.storages.values()) or not lacking:
                continue
            whole = next(n for n in self.env if storage_of(n.meta.get("val")) == storage)
            if whole.op == "call_function" and aliases(whole.target):
                continue        # torch took what made the memory for an earlier call's result; what is left are parts of it
            if isinstance(self.env[whole], Tensor) and all(n.meta["val"].dtype is whole.meta["val"].dtype for _, n, _ in outputs):
                t = self.b.realize(self.env[whole], self.spec(whole.meta["val"]).strides, tag=outputs[0][0] + 1)
                self._note_new(t, whole)
                made[storage] = t.expr.node
        return made

    # -- where things come from ----------------------------------------------------------------------------------------
    def _note(self, made, node: fx.Node | None) -> None:
        if node is not None:
            self.origins.setdefault(made, ())
            here = origin(node)
            if here not in self.origins[made]:
                self.origins[made] += (here,)

    def _note_new(self, t: Tensor, node: fx.Node | None) -> None:
        """Marks every node that `t` needs and that no earlier call made."""
        stack = [e.node for e in walk(t.expr) if isinstance(e, Load)]
        from ..ir.graph import reads
        while stack:
            n = stack.pop()
            if n not in self.origins:
                self._note(n, node)
                stack.extend(reads(n))
            elif isinstance(t.expr, Load) and n is t.expr.node:
                self._note(n, node)


def _shown(view: View, strides: Sequence[Index]) -> View:
    """`view` with the traced strides along extents of 1, where any would do: torch looks at them to choose a way."""
    return View(view.node, view.shape, tuple(y if e == 1 else x for x, y, e in zip(view.strides, strides, view.shape)), view.offset)


def _parts(node: fx.Node):
    """The value of a call that has none in its metadata (the partitioner's, of random numbers): what is taken out of it."""
    parts = {u.args[1]: u.meta.get("val") for u in node.users if u.target is operator.getitem}
    return tuple(parts.get(i) for i in range(max(parts) + 1)) if parts else None


class Flat:
    """Calls `target` and returns its results, tuples within tuples or values by names, as one tuple."""

    def __init__(self, target):
        self.target, self.__name__ = target, getattr(target, "__name__", str(target))

    def __call__(self, *args, **kwargs) -> tuple:
        return tuple(pytree.tree_leaves(self.target(*args, **kwargs)))

    def __repr__(self) -> str:
        return repr(self.target)


_SIZE_CALLS = {torch.ops.aten.sym_size.int, torch.ops.aten.sym_stride.int, torch.ops.aten.sym_numel.default,
               torch.ops.aten.sym_storage_offset.default}


def _map(value, leaf):
    if isinstance(value, (tuple, list)):
        return type(value)(_map(v, leaf) for v in value) if type(value) in (tuple, list) else tuple(_map(v, leaf) for v in value)
    if isinstance(value, dict):
        return {k: _map(v, leaf) for k, v in value.items()}
    return leaf(value)


def _foreign(value) -> bool:
    """Does `value` hold a tensor of a type that the language cannot compute in?"""
    if isinstance(value, (tuple, list)):
        return any(map(_foreign, value))
    if isinstance(value, dict):
        return any(map(_foreign, value.values()))
    return isinstance(value, Tensor) and value.dtype.kind == "x"


def _sized(value):
    """Index arguments that are plain integers become ints, so that builders meet Index only where a size is symbolic."""
    return _map(value, lambda x: x.constant if isinstance(x, Index) and x.constant is not None else x)
