"""What the compiler knows of a machine: frozen facts, found once and passed in."""
from __future__ import annotations

import functools
from dataclasses import dataclass

import torch


ORDERED_THREADS = 16        # what plans for an ordered target are made for, whatever machine runs them
ORDERED_PROCESSORS = 128    # the same for a GPU
CLUSTER = 8                 # programs of a cluster, on GPUs of NVIDIA that have them: from sm_90 on


@dataclass(frozen=True)
class Target:
    """`name`: the device, as torch writes it. `vector_bytes`: width of a vector register. `l1`, `l2`: bytes of cache a core has to itself. `threads`:
    how many run at once (a GPU's multiprocessors). `ordered`: the elements of a fold are taken in an order that depends on the fold alone, not on
    sizes beside it or on threads. `kind`: 'cpu' runs C over vectors, 'gpu' Triton over tiles; a gpu called 'cpu' is Triton's interpreter.
    `arch`: Triton's words for a GPU. `fast`: policy `fast` holds everywhere. `model`: a GPU's name, what tuned schedules are kept under. `cluster`:
    programs at most that see each other's shared memory. `tf32`: the user has allowed that products of f32 round their factors to TF32. `exact`: each
    operation is rounded by itself, so that what is computed twice has the same bits."""
    name: str = "cpu"
    vector_bytes: int = 64
    threads: int = 2
    l1: int = 32 << 10
    l2: int = 1 << 20
    ordered: bool = False
    kind: str = "cpu"
    arch: tuple = ()
    fast: bool = False
    model: str = ""
    cluster: int = 1
    tf32: bool = False
    exact: bool = False


@functools.cache
def _vector_bytes() -> int:
    capability = torch.backends.cpu.get_cpu_capability()
    return {"AVX512": 64, "AVX2": 32}.get(capability, 16)


def target(device: str = "cpu", ordered: bool = False, interpret: bool = False) -> Target:
    """`device`, as it is now (the number of threads may be changed by the user at any time, so an `ordered` target has none to look at).
    `interpret`: on the CPU, as if it were a small GPU."""
    if device != "cpu":
        return _gpu(device, ordered)
    if interpret:
        return Target("cpu", 16, 4, l1=1 << 18, l2=1 << 22, ordered=ordered, kind="gpu", arch=("cuda", 90, 32), model="interpreter",
                      cluster=CLUSTER)
    return Target("cpu", _vector_bytes(), ORDERED_THREADS if ordered else torch.get_num_threads(), ordered=ordered)


def tf32_allowed() -> bool:
    """Has the user allowed TF32 in torch's products of float32 on a GPU? Dynamo compiles anew when that changes."""
    asked = torch.backends.cuda.matmul      # `allow_tf32` raises where the newer setting was used
    return asked.fp32_precision == "tf32" if hasattr(asked, "fp32_precision") else asked.allow_tf32


@functools.cache
def _gpu(device: str, ordered: bool) -> Target:
    p = torch.cuda.get_device_properties(device)
    arch = ("cuda", p.major * 10 + p.minor, 32) if torch.version.hip is None else ("hip", p.gcnArchName.split(":")[0], p.warp_size)
    cluster = CLUSTER if arch[0] == "cuda" and p.major >= 9 else 1
    return Target(device, 16, ORDERED_PROCESSORS if ordered else p.multi_processor_count, l1=1 << 18, l2=p.L2_cache_size, ordered=ordered, kind="gpu",
                  arch=arch, model=p.name, cluster=cluster)
