"""The backend: what `torch.compile(model, backend="tokamak")` calls, and the pipeline.

`compile_graph` is the whole compiler, a stage a line. Every stage takes and returns frozen values; `trace` sees each of them in between.
"""
from __future__ import annotations

import importlib
import itertools
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Callable

import torch
from torch import fx
from torch._dynamo.utils import flatten_graph_inputs
from torch.autograd import forward_ad

from . import log
from .capture import aot, tables  # noqa: F401 (tables fill the registry)
from .capture.ahead import Ahead
from .capture.compared import compares_with_folds
from .capture.fx import Capture, Unsupported
from .capture.registry import ACTIVATED, ACTIVATED_ON_CPU, ADDED, ALONE, ATTENDED, MATRICES
from .capture.sizes import narrow
from .codegen import quicker
from .codegen.c_rows import unit as rows_unit
from .codegen.host import host_program
from .codegen.row_blocks import runs
from .codegen.stages import Lowered, lower_plan, render_plan, schedule_plan
from .errors import BuildError, CompilerMissing, OptionError, TokamakError
from .fuse.contract import contract
from .fuse.gradients import made_again
from .fuse.inline import inline
from .fuse.lines import whole_lines
from .fuse.pad import padded
from .fuse.parted import parted
from .fuse.plan import plan
from .fuse.price import measured
from .fuse.sizes import classified, condition
from .fuse.stream import stream
from .fuse.unroll import unrolled
from .fuse.weighted import weighted
from .fuse.widen import widened
from .garbage import uncollected, watch_dynamo
from .ir.graph import Compute, Graph, Input, Opaque, Result, Scatter, reads
from .ir.rewrite import simplify
from .nesting import deep
from .options import Options, current, one_of
from .runtime import gpu, gpu_build, memory, tuned
from .runtime.build import ROUND_EACH, Build, Unit, build
from .runtime.classes import Classes
from .runtime.graphed import Graphed
from .runtime.program import Program, assemble
from .runtime.rehearsal import Rehearsal
from .runtime.steps import in_blocks
from .target import Target, target, tf32_allowed
from .trace import Stopped, Trace, frame_of, tracer

_MODES = {None: {}, "default": {}, "reduce-overhead": {"cudagraphs": True}, "max-autotune": {"cudagraphs": True}, "max-autotune-no-cudagraphs": {}}
_MOVES_ONLY = frozenset({torch.ops.aten.sort.default, torch.ops.aten.sort.stable, torch.ops.aten.topk.default, torch.ops.aten.clone.default,
                         torch.ops.aten.empty.memory_format, torch.ops.aten.index.Tensor, torch.ops.aten.nonzero.default})
_POOL = memory.Pool()
_serial = itertools.count()


def backend(gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, mode: str | None = None,
            **changes) -> Callable:
    """Compiles one Dynamo graph. `options` and further keywords are fields of `Options`; `mode` is torch.compile's: options by another name."""
    watch_dynamo(backend)
    try:
        one_of("mode", mode, _MODES)
        chosen = current().change(_MODES[mode]).change({} if options is None else options).change(changes)
        if any(isinstance(x, (list, tuple, dict)) for x in example_inputs):         # compiled autograd hands over a list, which its graph takes apart
            return flatten_graph_inputs(gm, example_inputs, partial(backend, options=options, mode=mode, **changes))
        if any(isinstance(x, torch.Tensor) and x.is_mkldnn for x in example_inputs):        # has no memory to read; AOTAutograd hides that
            return gm
        _warm(example_inputs, chosen)
        early = _unwatched(chosen) and _gpu_graph(example_inputs, chosen)
        rehearsal = Rehearsal() if early and not chosen.target and not chosen.cudagraphs else None
        ahead = Ahead(partial(_begun, options=chosen, rehearsal=rehearsal)) if early else None
        one = partial(compile_or_fall_back, options=chosen, frame=frame_of(gm, chosen), ahead=ahead, rehearsal=rehearsal)
        with uncollected():
            free = chosen.policy == "fast" and not chosen.opaque_only
            tiles = not chosen.opaque_only and _gpu_graph(example_inputs, chosen)
            known = lambda device: measured(target(str(device), interpret=chosen.target == "interpret"))
            made = aot.autograd(gm, example_inputs, one, arithmetic_dropout=free, layouts=free, parts=tiles,
                                attention=free and tiles and chosen.streaming and chosen.contractions == "",
                                decoding=known, again=_made_again(known) if free and tiles and chosen.contractions == "" else None,
                                coming=ahead.expect if ahead is not None else None)
    except TokamakError as error:
        raise _shortened(error, sys._getframe()) from None
    made = aot.hidden(_with_tangents(made, gm))
    return made if chosen.recorder is None else chosen.recorder.function(gm, made)


watch_dynamo(backend)           # the first capture for it begins before it is called


def _made_again(known: Callable[[Any], bool]) -> Callable[..., bool]:
    """Whether the values between two layers of these extents are better made again by backward, on devices that are `known`."""
    return lambda device, *extents: made_again(*extents) and known(device)


def _with_tangents(made: Callable, gm: fx.GraphModule) -> Callable:
    """`made`; while forward-mode AD is on, the graph as Dynamo captured it, since only torch's operators carry tangents."""
    def run(*args):
        return made(*args) if forward_ad._current_level < 0 else gm(*args)
    return run


def _shortened(error: TokamakError, frame: Any) -> TokamakError:
    """`error` of the same class as one that Dynamo lets through, without frames between the user's call and `frame` or advice on Dynamo's bugs."""
    same = {"__module__": type(error).__module__, "__str__": lambda _: str(error)}
    kind = type(type(error).__name__, (type(error), torch._dynamo.exc.ShortenTraceback), same)
    return kind(*error.args, first_useful_frame=frame)


def compile(model=None, *, policy: str = "fast", dynamic: bool | None = None, mode: str | None = None, fullgraph: bool = False, **options):
    """`torch.compile` with this backend; also a decorator, with or without arguments. `model`: a module or function; its calls compile it.

    `policy`: "fast", "eager" (16-bit results are rounded where eager rounds, random numbers are eager's) or "strict" (sums in a fixed order, too).
    `dynamic`, `mode`, `fullgraph`: torch.compile's; "reduce-overhead" records a GPU's programs as CUDA graphs. `options`: further fields of
    `tokamak.Options`. Raises OptionError for an unknown option or a value it cannot have."""
    one_of("mode", mode, _MODES)
    changes = {"policy": policy, **options}
    current().change(changes)
    watch_dynamo(backend)
    return torch.compile(model, backend=partial(backend, options=changes, mode=mode), dynamic=dynamic, fullgraph=fullgraph)


def _unwatched(options: Options) -> bool:
    """Does nobody look at the stages, each at its time?"""
    return options.recorder is None and not options.logs and options.until is None and not options.check


def compile_or_fall_back(gm: fx.GraphModule, example_inputs: Sequence[Any], kind: str, options: Options, frame: Any = None,
                         ahead: Ahead | None = None, rehearsal: Rehearsal | None = None) -> Callable[[list], Any]:
    """The boxed function of one aten graph. What the language cannot hold, and what hits a bug of ours (unless `strict`), runs through torch.
    `ahead`: of the graph that follows; while the kernels of a forward graph are built, its backward graph is planned. `rehearsal`: makes the calls
    that stay torch's once before."""
    def again(work: Callable[[Trace, str], Callable[[list], Any]]) -> Callable[[list], Any]:
        return _or_fall_back(work, gm, kind, options, frame)
    with uncollected():
        begun = ahead.take(gm) if ahead is not None and kind == "backward" else None
    if begun is not None:
        return again(lambda trace, name: begun(example_inputs))
    meanwhile = ahead.now if ahead is not None and kind == "forward" else None
    return again(lambda trace, name: compile_graph(gm, example_inputs, options, trace, name, again, meanwhile, rehearsal))


def _or_fall_back(work: Callable[[Trace, str], Callable], gm: fx.GraphModule, kind: str, options: Options, frame: Any) -> Callable[[list], Any]:
    """What `work(trace, name)` makes of `gm`, or torch's way of running it."""
    name = f"{kind}_{next(_serial)}"
    trace = tracer(name, kind, frame, options)
    try:
        with uncollected(), deep():
            return work(trace, name)
    except Stopped:
        pass
    except Unsupported as why:
        trace("eager", f"runs through torch: {why}")
    except (CompilerMissing, OptionError):
        raise
    except Exception as error:
        if options.strict:
            raise
        why = _excuse(error)
        trace("eager", f"runs through torch because {why}")
        warnings.warn(f"tokamak: a graph runs eagerly because {why}; TOKAMAK_STRICT=1 raises it", stacklevel=4)
    return aot.eager(gm)


def _excuse(error: Exception) -> str:
    """Why a graph was not compiled: the machine did not let it, or there is a bug."""
    if isinstance(error, MemoryError):
        return "there was not enough memory to compile it"
    if isinstance(error, BuildError):
        return f"its kernels could not be built: {error}"
    return f"of a bug in the compiler: {type(error).__name__}: {error}"


def _warm(inputs: Sequence[Any], options: Options) -> None:
    """Has the processes that compile for a GPU start while the graph that uses one is still traced."""
    used = next((x.device for x in inputs if isinstance(x, torch.Tensor) and x.device.type == "cuda"), None)
    if used is not None and torch.version.hip is None and not options.opaque_only:
        gpu_build.warm(gpu.arch(str(used)))


def _gpu_graph(inputs: Sequence[Any], options: Options) -> bool:
    """Will kernels run on a GPU? On a CPU one kernel serves every size, so that nothing that depends on sizes is decided before there are kernels."""
    return options.target == "interpret" or any(isinstance(x, torch.Tensor) and x.device.type == "cuda" for x in inputs)


def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options, trace: Trace, name: str = "graph",
                  again: Callable[[Callable[[Trace, str], Callable]], Callable] | None = None,
                  meanwhile: Callable[[], None] | None = None, rehearsal: Rehearsal | None = None) -> Callable[[list], Any]:
    """FX graph of aten calls -> boxed function. A graph with size classes is compiled again from `simplify` on, within `again(work)`, when a call's
    sizes are in another class. `meanwhile`: called while kernels for a GPU are built; `rehearsal`: makes torch's calls meanwhile. Raises Unsupported
    when torch has to run the graph."""
    _require_plain(example_inputs)
    captured, constants, machine, graph = _understood(gm, options, trace, name)
    rest = partial(_kernels_and_program, captured, constants, machine, options, again=again, meanwhile=meanwhile,
                   rehearse=partial(_rehearse, rehearsal, gm))

    def later(work: Callable[[Trace, str], Callable]) -> Callable:
        def traced(trace: Trace, name: str) -> Callable:
            for stage, value in (("aten", gm), ("capture", captured), ("target", machine), ("simplify", graph)):
                trace(stage, value)
            return work(trace, name)
        return again(traced) if again is not None else traced(trace, name)
    return by_class(graph, machine, rest, trace, name, later, bool(options.check))


def _understood(gm: fx.GraphModule, options: Options, trace: Trace, name: str) -> tuple[Graph, Mapping, Target, Graph]:
    """The stages up to `simplify`: the graph as captured, its constants, the target, the graph."""
    trace("aten", gm)
    capture = Capture(gm, options.policy, name, table={} if options.opaque_only else None)
    captured = trace("capture", capture.graph())
    machine = target(_device(captured), "strict" in capture.policies, options.target == "interpret")
    exact = compares_with_folds(captured)
    fast, tf32 = capture.policies == {"fast"} and not exact, machine.kind == "gpu" and tf32_allowed()
    machine = trace("target", replace(machine, fast=fast, exact=exact, tf32=tf32))
    if machine.kind == "gpu" and machine.name != "cpu":
        gpu_build.warm(machine.arch)
    if machine.kind == "gpu":
        narrow(gm)
    if machine.ordered:
        trace("strict", unordered(captured))
    return captured, capture.constants, machine, trace("simplify", simplify(captured))


def _rehearse(rehearsal: Rehearsal | None, gm: fx.GraphModule, program: Program) -> Callable[[], None]:
    """Begins to make the calls of the program of `gm`. What ends it, before the program runs."""
    if rehearsal is None:
        return lambda: None
    rehearsal.add(program, [n.meta.get("val") for n in gm.graph.nodes if n.op == "placeholder"])
    return rehearsal.end


def _begun(gm: fx.GraphModule, options: Options, rehearsal: Rehearsal | None) -> Callable[[Sequence[Any]], Callable[[list], Any]]:
    """All of `compile_graph` that needs no waiting, while nobody looks: kernels for a GPU are being built when it returns. The function that is
    handed example inputs and waits for them. Raises Unsupported where that is not all."""
    trace: Trace = lambda stage, value: value
    captured, constants, machine, graph = _understood(gm, options, trace, "graph")
    graph = classified(graph, machine)
    if machine.kind != "gpu" or graph.classes:
        raise Unsupported("a program for each class of sizes")
    lowered = _planned(machine, options, graph, trace)
    finish = partial(_programmed, captured=captured, constants=constants, machine=machine, options=options)
    built, _, program = finish(lowered, trace=trace)
    end = _rehearse(rehearsal, gm, program)
    wait = _begin_kernels(built, machine, replace(options, progress=False), trace)

    def finished(example_inputs: Sequence[Any]) -> Callable[[list], Any]:
        _require_plain(example_inputs)
        return _when_built(lowered, built, program, wait, end, finish, machine, options, trace, "graph")
    return finished


def _when_built(lowered: Lowered, built: Mapping, program: Program, wait: Callable[[], Mapping], end: Callable[[], None], finish: Callable,
                machine: Target, options: Options, trace: Trace, name: str) -> Callable[[list], Any]:
    """The boxed function that runs `program`, or the one with quicker kernels, once `wait` has them. `end`: ends what went on meanwhile."""
    try:
        kernels = wait()
    finally:
        end()
    _, program, kernels = _relieved(lowered, built, program, kernels, finish, machine, options, trace)
    return _assembled(program, kernels, options, trace, name, None)


def _begin_kernels(built: Mapping, machine: Target, options: Options, trace: Trace, meanwhile: Callable[[], None] | None = None) -> Callable[[], Any]:
    """Begins to build kernels for a GPU, in a thread. The function that waits for them. `meanwhile`: called if any are not there yet."""
    if built and machine.name != "cpu":
        gpu_build.require_triton()              # here, where the error is the user's call's; the thread's is met when the program runs
    work = partial(_gpu_kernels, built, machine, machine.fast, options, partial(trace, "unit"))
    if machine.name == "cpu":
        kernels = work(meanwhile=meanwhile)
        return lambda: kernels
    thread, known = ThreadPoolExecutor(1), threading.Event()
    begun = thread.submit(work, meanwhile=known.set)
    begun.add_done_callback(lambda _: known.set())
    thread.shutdown(wait=False)
    if meanwhile is not None:
        known.wait()
        if not begun.done():
            meanwhile()
    return begun.result


def _when_called(make: Callable[[], Callable[[list], Any]]) -> Callable[[list], Any]:
    """The boxed function `make()`, which is made at its first call."""
    made, making = None, threading.Lock()

    def run(args: list) -> Any:
        nonlocal made, make
        if made is None:
            with making:
                if made is None:
                    made, make = make(), None           # what it was made of is let go
        return made(args)
    run._boxed_call = True
    return run


def by_class(graph: Graph, machine: Target, rest: Callable[..., Callable], trace: Trace, name: str, again: Callable, dispatched: bool) -> Callable:
    """The boxed function of `graph`: what `rest(graph, other, trace, name)` makes of it, for each class of its sizes when a call comes that is in it.
    `dispatched`: the sizes are looked at outside of the function, which returns more than the graph's results."""
    def sized(sizes: Mapping[str, int] | None) -> Graph:
        if sizes is None:
            return graph
        hints = {name: sizes[text] for name, text in graph.sizes.items() if text in sizes}
        return classified(replace(graph, hints={**graph.hints, **hints}), machine)

    def make(sizes: Mapping[str, int] | None, other: Callable) -> tuple[str, Callable]:
        g = sized(sizes)
        return condition(g), again(lambda trace, name: rest(g, other, trace, name))
    first = sized({})
    if not first.classes:           # no call comes back for another program: nothing of the language is kept
        return rest(first, None, trace, name)
    classes = Classes(tuple(i.name if isinstance(i, Input) else i for i in graph.inputs), make)
    fn = classes.enter(condition(first), rest(first, classes.other, trace, name))
    return classes.boxed() if dispatched else fn


def _kernels_and_program(captured: Graph, constants: Mapping, machine: Target, options: Options, graph: Graph, other: Callable, trace: Trace,
                         name: str, again: Callable | None = None, meanwhile: Callable[[], None] | None = None,
                         rehearse: Callable[[Program], Callable[[], None]] = partial(_rehearse, None, None)) -> Callable[[list], Any]:
    """The stages behind `simplify`, for sizes of the graph's classes: the boxed function. On a GPU, while nobody looks, one that waits for its
    kernels when it is called: torch has a graph's guards to build until then. `again`, `meanwhile`: see `compile_graph`; `rehearse`: `_rehearse`."""
    lowered = _planned(machine, options, graph, trace)
    finish = partial(_programmed, captured=captured, constants=constants, machine=machine, options=options)
    built, rows, program = finish(lowered, trace=trace)
    if machine.kind == "gpu" and other is None and again is not None and _unwatched(options):
        end = rehearse(program)
        wait = _begin_kernels(built, machine, options, trace, meanwhile)

        return _when_called(lambda: again(partial(_when_built, lowered, built, program, wait, end, finish, machine, options)))
    build_all = partial(_gpu_kernels, machine=machine) if machine.kind == "gpu" else partial(_c_kernels, further=rows)
    kernels = build_all(built, contract=machine.fast, options=options, report=partial(trace, "unit"))
    if machine.kind == "gpu":
        lowered, program, kernels = _relieved(lowered, built, program, kernels, finish, machine, options, trace)
    call = _assembled(program, kernels, options, trace, name, other)
    report = partial(trace, "check") if options.check == "report" else None
    check = _checker(options)
    return trace("build", check.checked(call, captured, lowered.plan, constants, report) if check else call)


def _planned(machine: Target, options: Options, graph: Graph, trace: Trace) -> Lowered:
    """The stages from `stream` to `lower`."""
    graph = trace("stream", stream(weighted(graph, machine), machine) if options.streaming else graph)
    inlined = inline(padded(unrolled(graph, machine), machine, MATRICES, options.contractions), machine)
    graph = trace("inline", whole_lines(inlined, machine))
    activated = ACTIVATED if machine.kind == "gpu" else ACTIVATED_ON_CPU
    graph = trace("contract", parted(contract(graph, machine, options.contractions, activated, ADDED, ALONE, ATTENDED), machine))
    planned = trace("fuse", plan(widened(graph, machine), machine))
    found = tuned.table(options.cache_dir, machine.model) if options.tuned and machine.model and not machine.ordered else {}
    scheduled = trace("schedule", schedule_plan(planned, machine, found))
    return trace("lower", lower_plan(scheduled, machine, found))


def _programmed(lowered: Lowered, captured: Graph, constants: Mapping, machine: Target, options: Options,
                trace: Trace) -> tuple[Mapping, tuple[Unit, ...], Program]:
    """The stages `render` and `program`; between them what else is built beside the kernels."""
    built = trace("render", render_plan(lowered))
    check = _checker(options)
    blocks = runs(lowered, machine) if not (check or options.opaque_only or options.contractions == "vendor") else ()
    rows = (rows_unit(machine.vector_bytes // 4),) if blocks else ()
    followed = check.watched(lowered.plan) if check else lowered.plan
    return built, rows, trace("program", host_program(followed, built, constants, blocks, rows[0].name if rows else "", captured))


_TAKEN: dict[gpu_build.Arch, dict] = {}         # what `quicker.others` has found in this process, for each GPU


def _relieved(lowered: Lowered, built: Mapping, program: Program, kernels: Mapping, finish: Callable, machine: Target, options: Options,
              trace: Trace) -> tuple[Lowered, Program, Mapping]:
    """The three with other schedules for kernels that spill or take long by their machine code, if there are any: `lower` and what is behind it once
    more."""
    if machine.name == "cpu" or machine.ordered or not options.tuned:   # the interpreter has no registers; machine code depends on sizes, an ordered
        return lowered, program, kernels                                # sum may not; `tokamak tune` begins at the heuristic's schedules
    binaries = {name: k.binary for name, k in kernels.items()}

    def build(units: Sequence[gpu_build.GpuUnit]) -> Mapping[str, gpu_build.Binary]:
        with log.progress(options) as line:
            return gpu_build.build([replace(u, contract=machine.fast) for u in units], machine.arch, cache_dir=options.cache_dir, progress=line)
    made = quicker.others(lowered, built, binaries, machine, build, _TAKEN.setdefault(machine.arch, {}), options.cache_dir)
    if made is lowered:
        return lowered, program, kernels
    trace("heuristic", lowered)
    trace("lower", made)
    built, _, program = finish(made, trace=trace)
    return made, program, _gpu_kernels(built, machine, machine.fast, options, partial(trace, "unit"))


def _assembled(program: Program, kernels: Mapping, options: Options, trace: Trace, name: str, other: Callable | None) -> Callable[[list], Any]:
    """The boxed function that runs `program`."""
    watch = options.recorder.watch(name) if options.recorder is not None else None
    run = _graphed(trace, options) if options.cudagraphs and not options.check else partial(_looked_at, options)
    return run(program, kernels, pool=_POOL if options.pool else None, synchronous=options.strict, watch=watch, other=other)


def _looked_at(options: Options, program: Program, kernels: Mapping, *, watch: Callable | None, **others) -> Callable[[list], list]:
    """As `assemble`; a program that is watched goes by `watch` only while somebody looks, so that nothing is slower in between."""
    plain = assemble(in_blocks(program), kernels, **others)
    if watch is None:
        return plain
    watched, looking = assemble(program, kernels, watch=watch, **others), options.recorder.looking

    def run(args: list) -> list:
        return watched(args) if looking() else plain(args)
    run._boxed_call = True
    return run


def _graphed(trace: Trace, options: Options) -> Callable[..., Callable]:
    """As `assemble`, with recordings."""
    def run(program: Program, kernels: Mapping, **others) -> Callable[[list], list]:
        looking = options.recorder.looking if options.recorder is not None else None
        return trace("graphs", Graphed(program, kernels, paused=looking, **others)).call()
    return run


def _c_kernels(built: Mapping, contract: bool, options: Options, report: Callable, further: tuple[Unit, ...]) -> dict[str, Callable]:
    """Kernels in C, and the functions `further`. `contract`: a product may be added to something without being rounded first."""
    flags = () if contract else (ROUND_EACH,)
    units = {b.key: Unit(b.key, b.text, prelude=b.prelude, flags=flags) for b in built.values()}
    with log.progress(options) as line:
        return build([*units.values(), *further], cache_dir=options.cache_dir, cc=options.cc, report=report, progress=line)


def _gpu_kernels(built: Mapping, machine: Target, contract: bool, options: Options, report: Callable,
                 meanwhile: Callable[[], None] | None = None) -> dict[str, Any]:
    """Kernels in Triton, for the GPU or its interpreter. `meanwhile`: called while they are built by others."""
    units = {p.unit.name: replace(p.unit, contract=contract) for b in built.values() for p in b.parts}
    if machine.name == "cpu":
        interpreted = importlib.import_module(".runtime.gpu_interpret", __package__).interpreted
        for name in units:
            report(Build(name, "interpreted"))
        if meanwhile is not None:
            meanwhile()
        return {name: interpreted(unit) for name, unit in units.items()}
    with log.progress(options) as line:
        return gpu.kernels(list(units.values()), machine.arch, cache_dir=options.cache_dir, cc=options.cc, report=report, progress=line,
                           meanwhile=meanwhile)


def _checker(options: Options):
    """The module that checks calls, only loaded where it is asked for; or None."""
    return importlib.import_module(".check", __package__) if options.check else None


def unordered(graph: Graph) -> tuple[Opaque, ...]:
    """The opaque calls that may take the terms of a sum in an order that depends on other sizes or on threads: torch promises nothing."""
    def promises(call: Opaque) -> bool:
        tags = getattr(call.target, "tags", ())
        exact = all(r is None or not r.dtype.is_float for r in call.results)
        return exact or torch.Tag.pointwise in tags or torch.Tag.nondeterministic_seeded in tags or call.target in _MOVES_ONLY
    return tuple(n for n in graph.nodes if isinstance(n, Opaque) and not promises(n))


def _require_plain(inputs: Sequence[Any]) -> None:
    """Kernels read strided memory as it is: a tensor whose values are the negatives of its memory, or one in a library's own layout, is torch's
    business. So is the ragged size of nested tensors, which is no number."""
    for x in inputs:
        if isinstance(x, torch.Tensor) and x.layout is not torch.strided:
            raise Unsupported(f"an input in the layout {x.layout}")
        if isinstance(x, torch.Tensor) and x.is_neg():
            raise Unsupported("an input with the negative bit")
        if isinstance(x, torch.SymInt) and x.node.is_nested_int():
            raise Unsupported("the ragged size of a nested tensor")


def _device(graph: Graph) -> str:
    """The device on which the graph computes: kernels read its memory alone, so a graph that computes on several is torch's business."""
    found = {x.device for n in graph.nodes if isinstance(n, (Compute, Scatter)) for x in (n, *reads(n))}
    if not found and torch.version.hip is None:             # calls alone, which may become kernels
        products = {n.device for n in graph.nodes if isinstance(n, Result) and n.opaque.meaning is not None}
        found = products if len(products) == 1 and next(iter(products)).startswith("cuda") else found
    if len(found) > 1:
        raise Unsupported(f"it computes with values on {', '.join(sorted(found))}")
    device = next(iter(found), "cpu")
    if device.split(":")[0] not in ("cpu", "cuda"):
        raise Unsupported(f"it computes with values on {device}")
    if device != "cpu" and torch.version.hip is not None:
        raise Unsupported(f"it computes with values on {device}, and kernels are launched on NVIDIA's GPUs only")
    return device
