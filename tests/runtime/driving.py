"""A library that stands for the driver and records what it is asked; torch's side of GPUs, made of CPU memory; kernels for them."""
from __future__ import annotations

import ctypes
import subprocess

import pytest
import torch

from tokamak.runtime import build as c_build
from tokamak.runtime import gpu, gpu_errors
from tokamak.runtime.gpu import Kernel
from tokamak.runtime.gpu_build import Binary, GpuUnit

DRIVER = r"""
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
typedef struct { void *function; unsigned shape[7]; void *stream; int64_t arguments[16]; int32_t small; int together; void *context; } launch;
launch launches[512];
int launched, loaded, answer, count = 3, mode = 0, relaxed_at_load, shared_asked, any_cluster;
char images[64][16];
void *current;
int cuGetErrorName(int code, const char **text) { *text = code == 1 ? "CUDA_ERROR_INVALID_VALUE" : "CUDA_ERROR_SOMETHING"; return 0; }
int cuGetErrorString(int code, const char **text) { *text = "in the driver's words"; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetAttribute(int *value, int which, int device) { *value = which == 16 ? 132 : 0; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(intptr_t)(0x1000 + device); return 0; }
int cuCtxGetCurrent(void **context) { *context = current; return 0; }
int cuCtxSetCurrent(void *context) { current = context; return 0; }
static void *pushed;
int cuCtxPushCurrent_v2(void *context) { pushed = current; current = context; return 0; }
int cuCtxPopCurrent_v2(void **context) { *context = current; current = pushed; return 0; }
int cuModuleLoadData(void **module, const char *image) {
    if (!strncmp(image, "bad", 3)) return 209;
    relaxed_at_load = mode; strncpy(images[loaded], image, 15); *module = images[loaded++]; return 0;
}
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = module; return 0; }
int cuFuncGetAttribute(int *value, int which, void *function) { *value = 0; return 0; }
int cuFuncSetAttribute(void *function, int which, int value) { if (which == 8) shared_asked = value; else any_cluster += which == 14; return 0; }
static int take(void *f, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned g, unsigned s, void *stream, void **p, int together) {
    if (answer) return answer;
    launch *l = &launches[__atomic_fetch_add(&launched, 1, __ATOMIC_SEQ_CST)];
    unsigned shape[7] = {a, b, c, d, e, g, s};
    l->function = f; memcpy(l->shape, shape, sizeof shape); l->stream = stream; l->together = together; l->context = current;
    for (int i = 0; i < count + 2; i++) l->arguments[i] = *(int64_t *)p[i];
    l->small = *(int32_t *)p[1];
    return 0;
}
int cuLaunchKernel(void *f, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned g, unsigned s, void *stream, void **p, void **extra)
{
    return extra ? 999 : take(f, a, b, c, d, e, g, s, stream, p, 0);
}
int cuLaunchCooperativeKernel(void *f, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned g, unsigned s, void *stream, void **p) {
    return take(f, a, b, c, d, e, g, s, stream, p, 1);
}
typedef struct { int id; char padding[4]; unsigned size[3]; char rest[52]; } attribute;
typedef struct { unsigned grid[3], block[3], shared; void *stream; attribute *attributes; unsigned count; } configuration;
int cuLaunchKernelEx(const configuration *h, void *f, void **p, void **extra) {
    if (!extra && !h->count)
        return take(f, h->grid[0], h->grid[1], h->grid[2], h->block[0], h->block[1], h->block[2], h->shared, h->stream, p, 0);
    if (extra || h->count != 1 || h->attributes->id != 4 || h->attributes->size[1] != 1 || h->attributes->size[2] != 1) return 999;
    return take(f, h->grid[0], h->grid[1], h->grid[2], h->block[0], h->block[1], h->block[2], h->shared, h->stream, p, -(int)h->attributes->size[0]);
}
int cuTensorMapEncodeTiled(void *map, int type, unsigned rank, void *at, const uint64_t *extents, const uint64_t *steps, const uint32_t *block,
                           const uint32_t *ones, int interleave, int swizzle, int promotion, int fill) {
    if (interleave || promotion != 2 || fill || ones[0] != 1 || ones[rank - 1] != 1 || (intptr_t)map % 64 || (intptr_t)at % 16) return 999;
    int64_t seen[6] = {type * 100 + rank * 10 + swizzle, (intptr_t)at, extents[0] * 1000 + extents[1], steps[0], block[0] * 1000 + block[1], 0};
    for (int i = 0; i < 5; i++) seen[5] = seen[5] * 31 + seen[i];
    memcpy(map, seen + 5, 8); memcpy((char *)map + 8, seen, 40);
    return 0;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, void *f, int threads, size_t shared) { *n = 2048 / threads; return 0; }
int cuMemHostAlloc(void **host, size_t size, unsigned flags) { *host = malloc(size); memset(*host, 7, size); return flags == 3 ? 0 : 1; }
int cuMemHostGetDevicePointer_v2(void **there, void *host, unsigned flags) { *there = host; return 0; }
typedef struct { void *function; unsigned shape[7]; void **parameters, **extra, *kernel, *context; } node;
typedef struct { int nodes, ended; launch at[64]; } graph;
int graphs, made, set, replayed, ended, captures, refused;
static int written(launch *l, const node *n) {
    if (refused) return refused;
    l->function = n->function; memcpy(l->shape, n->shape, sizeof n->shape);
    for (int i = 0; i < count + 2; i++) l->arguments[i] = *(int64_t *)n->parameters[i];
    l->small = *(int32_t *)n->parameters[1];
    return n->extra || n->kernel || n->context ? 999 : 0;
}
int cuGraphCreate(graph **g, unsigned flags) { *g = calloc(1, sizeof **g); graphs++; return flags; }
int cuGraphAddKernelNode_v2(launch **at, graph *g, launch *const *before, size_t count, const node *n) {
    if (count != (g->nodes > 0) || count && *before != g->at + g->nodes - 1) return 998;
    *at = g->at + g->nodes++;
    return written(*at, n);
}
int cuGraphInstantiateWithFlags(graph **to, graph *from, unsigned long long flags) {
    *to = malloc(sizeof **to); memcpy(*to, from, sizeof **to); made++;
    (*to)->at[0].context = from;
    return flags || mode != 2;
}
int cuGraphExecKernelNodeSetParams_v2(graph *g, launch *at, const node *n) {
    set++;
    return written(g->at + (at - ((graph *)g->at[0].context)->at), n);
}
int cuGraphKernelNodeSetAttribute(launch *at, int id, const unsigned *size) {
    at->together = -(int)size[0];
    return id == 4 && size[1] == 1 && size[2] == 1 ? 0 : 999;
}
int cuGraphLaunch(graph *g, void *stream) {
    if (answer) return answer;
    launch *l = &launches[__atomic_fetch_add(&launched, g->nodes, __ATOMIC_SEQ_CST)];
    for (int i = 0; i < g->nodes; i++) { l[i] = g->at[i]; l[i].context = current; l[i].stream = stream; }
    replayed++;
    return 0;
}
int cuStreamIsCapturing(void *stream, int *status) { *status = captures; return 0; }
int cuGraphExecDestroy(graph *g) { ended++; return 0; }
int cuGraphDestroy(graph *g) { ended++; return 0; }
int cuThreadExchangeStreamCaptureMode(int *m) { int before = mode; mode = *m; *m = before; return 0; }
"""


class Recorded(ctypes.Structure):
    _fields_ = [("function", ctypes.c_char_p), ("shape", ctypes.c_uint * 7), ("stream", ctypes.c_void_p), ("arguments", ctypes.c_int64 * 16),
                ("small", ctypes.c_int32), ("together", ctypes.c_int), ("context", ctypes.c_void_p)]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    subprocess.run([*c_build.compiler().command, "-shared", "-fPIC", "-w", str(folder / "driver.c"), "-o", str(folder / "driver.so")], check=True)
    return folder / "driver.so"


class Fake:
    """The recording driver, fresh."""

    def __init__(self, path, tmp_path):
        copy = tmp_path / "libcuda.so"
        copy.write_bytes(path.read_bytes())
        self.library = ctypes.CDLL(str(copy))
        self.driver = gpu.Driver(self.library)

    def number(self, name: str) -> ctypes.c_int:
        return ctypes.c_int.in_dll(self.library, name)

    @property
    def launches(self) -> list[Recorded]:
        return list((Recorded * 512).in_dll(self.library, "launches"))[:self.number("launched").value]

    def kernel(self, launch, **fields) -> Kernel:
        unit = GpuUnit("k", "text", ("*fp32", "i32", "fp64"), **{"divisible": frozenset({0}), **fields})
        self.rebuilt: list[GpuUnit] = []
        return Kernel(binary(unit), lambda u: (self.rebuilt.append(u), binary(u))[1], launch, lambda: self.driver)


def binary(unit: GpuUnit, **fields) -> Binary:
    code = b"k" + bytes(48 + i for i in sorted(unit.divisible)) + b"\0 code"
    return Binary(unit, ("cuda", 90, 32), **{"code": code, "entry": "k", "shared": 0, "threads": 32 * unit.warps, "registers": 8, "spilled": 0,
                                             "scratch": (0, 1), "hidden": 2, "maps": (), "packed": b"", **fields})


@pytest.fixture
def fake(library, tmp_path):
    return Fake(library, tmp_path)


@pytest.fixture(params=["c", "python"])
def launch(request):
    return gpu.launcher() if request.param == "c" else gpu.launch_in_python


class Device:
    """torch's side of GPUs, made of CPU memory: what a program asks of it, in order."""

    def __init__(self, monkeypatch):
        self.current, self.log = 3, []
        monkeypatch.setattr(gpu, "exchange_device", self.exchange)
        monkeypatch.setattr(gpu, "raw_stream", lambda i: (self.log.append(f"stream {i}"), 700 + i)[1])
        monkeypatch.setattr(gpu, "empty", self.empty)
        monkeypatch.setattr(gpu, "wait", lambda *devices: self.log.append(f"wait {devices}"))

    def exchange(self, device: int) -> int:
        before, self.current = self.current, device
        return before

    def empty(self, shape, strides, dtype):
        self.log.append(f"empty on {self.current}")
        return torch.empty_strided(shape, strides, dtype=dtype)


@pytest.fixture
def device(monkeypatch, fake):
    monkeypatch.setattr(gpu_errors, "_pages", {})
    monkeypatch.setattr(gpu, "driver", lambda: fake.driver)
    return Device(monkeypatch)
