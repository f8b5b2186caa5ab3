"""The process that measures. It is told cases, and says on a pipe, a line of JSON each, what it begins and what came out:

    {"ready": machine and rates}   {"begin": case, "side": side}   {"case": case, "side": side, "result": {...}}   {"end": true}

A side that raises is a result too. After an error that the device does not survive the process ends, and whoever started it starts another.
"""
from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence

import torch

from .gpu_cases import case
from .gpu_measure import Timer, machine, rates
from .gpu_sides import compiled, measure, reference

Todo = Sequence[tuple[str, tuple[str, ...]]]       # (case, sides)


def failure(error: BaseException) -> dict:
    """An error as a result: its class and message in one line, and where it was raised."""
    where = traceback.extract_tb(error.__traceback__)
    place = f"{where[-1].filename.rsplit('/', 1)[-1]}:{where[-1].lineno}" if where else ""
    text = " ".join(str(error).split())
    return {"failed": f"{type(error).__name__}: {text[:400]}", "at": place}


def alive() -> bool:
    """Whether the device still answers."""
    try:
        torch.cuda.synchronize()
        return True
    except Exception:
        return False


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def work(todo: Todo, say: Callable[[dict], None], timer, device: str, seed: int = 0, cached: bool = False) -> None:
    """Measures every side of every case, in order. Inputs and the float64 run are made once a case."""
    for name, sides in todo:
        one = case(name)
        say({"begin": name, "side": "reference"})
        try:
            inputs = one.inputs(device, seed)
            expected = reference(one, inputs, seed)
        except Exception as error:
            result = failure(error)
            for side in sides:
                say({"case": name, "side": side, "result": {**result, "failed": f"float64 run: {result['failed']}"}})
            free()
            continue
        for side in sides:
            say({"begin": name, "side": side})
            start = time.perf_counter()
            try:
                result = measure(one, side, inputs, expected, timer, seed, cached)
            except Exception as error:
                result = failure(error)
            say({"case": name, "side": side, "result": {**result, "took": time.perf_counter() - start}})
            if "failed" in result and device == "cuda" and not alive():
                sys.exit(3)
        del inputs, expected
        free()


def warm_up(sides) -> None:
    """An unrelated compile a side, so that the first case does not pay for imports and worker processes."""
    for side in sides:
        torch._dynamo.reset()
        try:
            compiled(side, lambda x: x.sin() + 1)(torch.randn(64, device="cuda"))
        except Exception as error:
            print(f"warm-up of {side}: {failure(error)['failed']}", file=sys.stderr)


def serve(job: dict, say: Callable[[dict], None]) -> None:
    """Runs a job, {'todo', 'sides', 'calls', 'seed', 'rates', 'cached'}, on this machine's GPU."""
    timer = Timer(job["calls"])
    say({"ready": {**machine(), **(job["rates"] or rates(timer))}})
    warm_up(job["sides"])
    work(job["todo"], say, timer, "cuda", job["seed"], job["cached"])
    say({"end": True})


def told(serve: Callable[[dict, Callable[[dict], None]], None]) -> None:
    """Runs `serve(job, say)` in a process of its own: the job is a line of JSON on standard input, what is said a line each on the descriptor that
    the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("pipe", type=int, help="the descriptor to write to")
    with open(parser.parse_args().pipe, "w", buffering=1) as pipe:
        serve(json.loads(sys.stdin.readline()), lambda message: print(json.dumps(message), file=pipe))


if __name__ == "__main__":
    told(serve)
