"""The launcher in C: what a program's function calls to have kernels launched.

    packed ::= address of a record; grid x, y, z; the kernel's arguments; of each box its address, offset, extents, strides: 8 bytes each
    list   ::= launches; values; of each value: is it a float?; of each launch: words; fills; its packed words; of each fill a position and a value

`tk_gpu_launch(packed, stream)` makes one launch. A list is what is known of several before a call: the caller made of it, a function of Python's,
takes the stream and the values that only the call shows, adds each value to the words that need it, and launches one after the other. That is one
call of the host's for as many kernels as follow each other, without an object a kernel. It uses Python's interface by the addresses of its functions
(those that stay the same from version to version), so it needs no headers.

A list of `FEWEST` launches or more is handed to the driver as one graph: a node a launch, each behind the one before, made once the list was called
a few times. At each call every node gets the arguments of that call, so nothing of an earlier one is kept and nothing is copied. Where that cannot be
(a stream that is being captured, a grid without programs, descriptors, another thread in the same graph, a driver without it), the launches
are made one by one.
"""
from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from ctypes import c_char_p, c_int, c_int32, c_int64, c_uint, c_void_p, py_object
from typing import Any

from . import build as c_build

HEAD = 4                    # words of a packed launch before the arguments: address of the record, grid
# Launches that are handed over as a graph. On an H200, behind a kernel by itself, microseconds of the device (of empty kernels, launched and as a
# graph) and of the host: 1 launch 3.17, 3.56 and 6.6, 4.8; 2: 4.72, 4.62 and 9.6, 6.0; 4: 7.82, 6.13 and 16.1, 6.5; 16: 26.5, 15.6 and 54, 8.4; 64:
# 101, 52 and 202, 17. A node takes 3 KiB of the device's memory.
FEWEST = 4
TURNS = 2                   # graphs of a list, in turn: the driver may wait for a graph at work before it is given other arguments
OFTEN = 1                   # calls of a list, for each of them, before it is made
_STATE = 6                  # words of what is known of one, in front of its nodes
TRIES = 3                   # times that this may fail

_COMMON = """#include <stdint.h>
#define CLUSTER 4               // the driver's number of that attribute
typedef struct { int id; char padding[4]; unsigned size[3]; char rest[52]; } attribute;
typedef struct { unsigned grid[3], block[3], shared; void *stream; attribute *attributes; unsigned count; } configuration;
typedef struct { int32_t rank, type, bytes, swizzle; uint32_t block[5]; } box;
typedef struct kernel {
    void *function;
    const struct kernel *next;
    int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
    int (*together)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **);
    int (*clustered)(const configuration *, void *, void **, void **);
    int (*encode)(void *, int, unsigned, void *, const uint64_t *, const uint64_t *, const uint32_t *, const uint32_t *, int, int, int, int);
    const int32_t *divisible;
    const box *box;
    const struct graphs *graphs;
    int32_t checks, count, hidden, threads, shared, cooperative, cluster, boxes, ready;
} kernel;

static int describe(const kernel *k, const box *b, void *map, const int64_t *at) {
    uint64_t extents[5], steps[5];
    uint32_t ones[5] = {1, 1, 1, 1, 1}, block[5];
    for (int d = 0; d < b->rank; d++) {
        extents[b->rank - 1 - d] = at[2 + d];
        block[b->rank - 1 - d] = b->block[d];
        if (d + 1 < b->rank) steps[b->rank - 2 - d] = at[2 + b->rank + d] * b->bytes;
    }
    return k->encode(map, b->type, b->rank, (void *)(at[0] + at[1] * b->bytes), extents, steps, block, ones, 0, b->swizzle, 2, 0);
}

typedef struct { void *function; unsigned grid[3], block[3], shared; void **parameters, **extra, *kernel, *context; } node;
typedef struct graphs {
    int (*create)(void **, unsigned);
    int (*add)(void **, void *, void *const *, uintptr_t, const node *);
    int (*instantiate)(void **, void *, unsigned long long);
    int (*set)(void *, void *, const node *);
    int (*launch)(void *, void *);
    int (*capturing)(void *, int *);
    int (*mode)(int *);
    int (*forget)(void *);
    int (*drop)(void *);
    int (*attribute)(void *, int, const void *);
} graphs;
typedef struct { void *made, *graph, **nodes; } place;          // of a launch: in a graph that is `made`, or in one that is being

static int64_t launched(const int64_t *words, int64_t stream, const place *into) {
    const int64_t *arguments = words + 4;
    const int64_t x = words[1], y = words[2], z = words[3];
    if (x <= 0 || y <= 0 || z <= 0) return into ? -1 : 0;
    if ((x | y | z) >> 31) return 1;
    const kernel *k = (const kernel *)words[0];
    for (; k; k = k->next) {
        int64_t bits = 0;
        for (int i = 0; i < k->checks; i++) bits |= arguments[k->divisible[i]];
        if (!(bits & 15)) break;
    }
    if (!k || !k->ready || into && (k->cooperative || k->boxes)) return -1;
    int count = k->count;
    void *none = 0, *parameters[count + 11 * k->boxes + k->hidden];
    for (int i = 0; i < count; i++) parameters[i] = (void *)(arguments + i);
    struct { _Alignas(64) char bytes[128]; } maps[k->boxes ? k->boxes : 1];
    const int64_t *at = arguments + count;
    for (int i = 0; i < k->boxes; i++) {
        const box *b = k->box + i;
        int failed = describe(k, b, maps + i, at);
        if (failed) return failed;
        parameters[count++] = maps + i;
        for (int d = 2; d < 2 + 2 * b->rank; d++) parameters[count++] = (void *)(at + d);
        at += 2 + 2 * b->rank;
    }
    for (int i = 0; i < k->hidden; i++) parameters[count + i] = &none;
    if (into) {
        node n = {k->function, {x, y, z}, {k->threads, 1, 1}, k->shared, parameters, 0, 0, 0};
        if (into->made) return k->graphs->set(into->made, into->nodes[0], &n);
        int first = !into->nodes[-1], failed = k->graphs->add(into->nodes, into->graph, first ? 0 : into->nodes - 1, !first, &n);
        unsigned size[16] = {k->cluster, 1, 1};
        return failed || k->cluster <= 1 ? failed : k->graphs->attribute(into->nodes[0], CLUSTER, size);
    }
    if (k->cooperative)
        return k->together(k->function, x, y, z, k->threads, 1, 1, k->shared, (void *)stream, parameters);
    if (k->cluster > 1) {
        attribute size = {CLUSTER, {0}, {k->cluster, 1, 1}, {0}};
        configuration how = {{x, y, z}, {k->threads, 1, 1}, k->shared, (void *)stream, &size, 1};
        return k->clustered(&how, k->function, parameters, 0);
    }
    return k->launch(k->function, x, y, z, k->threads, 1, 1, k->shared, (void *)stream, parameters, 0);
}

"""

_ONE = """int64_t tk_gpu_launch(const int64_t *words, int64_t stream) { return launched(words, stream, 0); }
"""

_LIST = f"""#define FEWEST {FEWEST}
#define OFTEN {OFTEN}
#define TRIES {TRIES}
#define TURNS {TURNS}
#define STATE {_STATE}
""" + """typedef struct object object;
static struct {
    long long (*as_long)(object *);
    object *(*long_of)(long long);
    double (*as_double)(object *);
    object *(*failed)(void);
    void *(*let_go)(void);
    void (*take_again)(void *);
    char *(*bytes)(object *);
    object *(*item)(object *, intptr_t);
    object *(*call)(object *, object *const *, uintptr_t, object *);
    void (*decrease)(object *);
} python;

// Of a list: calls; its graph, as it is launched and as it was written, and what ends these; and its nodes, behind one that is none.
typedef struct { int64_t calls; void *made, *graph; int (*forget)(void *), (*drop)(void *); int busy, failed; void *nodes[]; } state;

static int64_t all(const int64_t *at, int64_t launches, const int64_t *given, int64_t stream, const place *into) {
    place here = into ? *into : (place){0};
    for (int64_t i = 0; i < launches; i++) {
        int64_t words = at[0], fills = at[1], packed[words];
        at += 2;
        for (int64_t w = 0; w < words; w++) packed[w] = at[w];
        at += words;
        for (; fills; fills--, at += 2) packed[at[0]] += given[at[1]];
        if (launched(packed, stream, into ? &here : 0)) return i + 1;
        if (into) here.nodes++;
    }
    return 0;
}

static int made(const int64_t *at, int64_t launches, const int64_t *given, const graphs *g, state *s) {
    place into = {0, 0, s->nodes + 1};
    int mode = 2;
    s->nodes[0] = 0;
    g->mode(&mode);
    int failed = g->create(&into.graph, 0) || all(at, launches, given, 0, &into) || g->instantiate(&s->made, into.graph, 0);
    if (failed) {
        if (into.graph) g->drop(into.graph);
        s->made = 0;
        s->failed++;
    } else {
        s->graph = into.graph;
        s->forget = g->forget;
        s->drop = g->drop;
    }
    g->mode(&mode);
    return !failed;
}

static int together(const int64_t *at, int64_t launches, const int64_t *given, int64_t stream, state *s) {
    const graphs *g = ((const kernel *)at[2])->graphs;
    int status = 0, done = 0;
    if (s->failed > TRIES || !g || __atomic_exchange_n(&s->busy, 1, __ATOMIC_ACQUIRE)) return 0;
    if (s->calls < OFTEN) s->calls++;
    else if (!g->capturing((void *)stream, &status) && !status) {
        place into = {s->made, 0, s->nodes + 1};
        done = s->made ? !all(at, launches, given, stream, &into) : made(at, launches, given, g, s);
        done = done && !g->launch(s->made, (void *)stream);
    }
    __atomic_store_n(&s->busy, 0, __ATOMIC_RELEASE);
    return done;
}

static object *rest(object *self, int64_t from, object *const *args, int64_t count) {
    object *number = python.long_of(from), *handed[count + 1];
    if (!number) return 0;
    handed[0] = number;
    for (int64_t i = 0; i < count; i++) handed[i + 1] = args[i];
    object *out = python.call(python.item(self, 1), handed, count + 1, 0);
    python.decrease(number);
    return out;
}

static object *tk_gpu_all(object *self, object *const *args, intptr_t count) {
    const int64_t *list = (const int64_t *)python.bytes(python.item(self, 0));
    int64_t launches = list[0], values = list[1], given[values + 1];
    if (count != values + 1) return rest(self, 0, args, count);
    for (int64_t i = 0; i <= values; i++) {
        if (i && list[1 + i]) {
            union { double number; int64_t bits; } v = {python.as_double(args[i])};
            given[i] = v.bits;
            if (v.number == -1.0 && python.failed()) return 0;
        } else {
            given[i] = python.as_long(args[i]);
            if (given[i] == -1 && python.failed()) return 0;
        }
    }
    const int64_t *at = list + 2 + values;
    int64_t *states = (int64_t *)python.as_long(python.item(self, 3));
    state *s = (state *)(states + 1 + states[0]++ % TURNS * (STATE + 1 + launches));
    void *thread = python.let_go();
    int64_t stopped = 0;
    if (launches < FEWEST || !together(at, launches, given + 1, given[0], s)) stopped = all(at, launches, given + 1, given[0], 0);
    python.take_again(thread);
    return stopped ? rest(self, stopped - 1, args, count) : python.long_of(0);
}

int64_t tk_gpu_list(const int64_t *functions, int64_t count) {
    for (int64_t i = 0; i < count; i++) ((int64_t *)&python)[i] = functions[i];
    return (int64_t)tk_gpu_all;
}
"""

_PYTHON = ("PyLong_AsLongLong", "PyLong_FromLongLong", "PyFloat_AsDouble", "PyErr_Occurred", "PyEval_SaveThread", "PyEval_RestoreThread",
           "PyBytes_AsString", "PyTuple_GetItem", "PyObject_Vectorcall", "Py_DecRef")
_FASTCALL = 0x80            # Python's METH_FASTCALL


class Box(ctypes.Structure):
    """What is known of a descriptor before a call."""
    _fields_ = [("rank", c_int32), ("type", c_int32), ("bytes", c_int32), ("swizzle", c_int32), ("block", c_uint * 5)]


class Record(ctypes.Structure):
    """A kernel on a device as the launcher sees it. `ready`: it may be launched as it stands."""
    _fields_ = [("function", c_void_p), ("next", c_void_p), ("launch", c_void_p), ("together", c_void_p), ("clustered", c_void_p),
                ("encode", c_void_p), ("divisible", ctypes.POINTER(c_int32)), ("box", ctypes.POINTER(Box)), ("graphs", c_void_p),
                ("checks", c_int32), ("count", c_int32),
                ("hidden", c_int32), ("threads", c_int32), ("shared", c_int32), ("cooperative", c_int32), ("cluster", c_int32), ("boxes", c_int32),
                ("ready", c_int32)]


class Attribute(ctypes.Structure):
    """The driver's CUlaunchAttribute with the size of a cluster, and the configuration of a launch that has it."""
    _fields_ = [("id", c_int), ("padding", c_int), ("size", c_uint * 3), ("rest", ctypes.c_char * 52)]


class Configuration(ctypes.Structure):
    _fields_ = [("grid", c_uint * 3), ("block", c_uint * 3), ("shared", c_uint), ("stream", c_void_p), ("attributes", ctypes.POINTER(Attribute)),
                ("count", c_uint)]


class _Method(ctypes.Structure):
    """Python's PyMethodDef."""
    _fields_ = [("name", c_char_p), ("function", c_void_p), ("flags", c_int), ("doc", c_char_p)]


Caller = Callable[[Any], Callable[..., int]]          # of a `runs.Run`: its function of (stream, *values)


def compiled(cache_dir: str = "", cc: str = "") -> tuple[Callable[[bytes, int], int], Caller]:
    """(what makes one launch, what makes the callers of lists). Raises CompilerMissing or BuildError."""
    units = [c_build.Unit("tk_gpu_launch", _ONE, prelude=(_COMMON,)), c_build.Unit("tk_gpu_list", _LIST, prelude=(_COMMON,))]
    made = c_build.build(units, cache_dir=cache_dir, cc=cc)
    functions = (c_int64 * len(_PYTHON))(*(ctypes.cast(getattr(ctypes.pythonapi, n), c_void_p).value for n in _PYTHON))
    method = _Method(b"launch", made["tk_gpu_list"](bytes(functions), len(_PYTHON)), _FASTCALL, None)
    new = ctypes.PYFUNCTYPE(py_object, c_void_p, py_object, c_void_p)(("PyCFunction_NewEx", ctypes.pythonapi))

    def caller(run: Any) -> Callable[..., int]:
        states = (c_int64 * (1 + TURNS * (_STATE + 1 + len(run.kernels))))()           # how often one was used; each
        made = new(ctypes.addressof(method), (run.listed(), run.rest, method, ctypes.addressof(states), states), None)
        weakref.finalize(made, _forget, states).atexit = False
        return made
    return made["tk_gpu_launch"], caller


_ENDS = ctypes.CFUNCTYPE(c_int, c_void_p)


def _forget(states: ctypes.Array) -> None:
    """Ends the graphs of a list that is gone. The driver waits for one that is at work."""
    each = (len(states) - 1) // TURNS
    for at in range(1, len(states), each):
        _, *handles, forget, drop, _ = states[at:at + _STATE]
        for end, handle in zip((forget, drop), handles):
            if handle:
                _ENDS(end)(handle)
