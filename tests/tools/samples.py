"""Profiles that were never measured, of any size, for the tests of what shows them."""
from __future__ import annotations

NASTY = '</script><script>document.title = "broken"</script><img src=x onerror="document.title = 1"> & \u2028 <!-- \' "'


def peaks() -> dict:
    return {"device": "some CPU", "copy": [[8192, 1e-6], [1 << 20, 1e-4]], "matmul": {"float32": 1e11}, "launch": 1e-6, "measured": "2026"}


def node(n: int, layers: int = 24, name: str = "", seconds: float | None = None) -> dict:
    torch = n % 5 == 4
    took = seconds if seconds is not None else 1e-5 * (1 + n % 7)
    return {
        "position": n, "name": name or ("mm.default" if torch else f"poi_fused_add_mul_{n}"),
        "module": f"model.layers.{n * layers // 10000 % layers}.block{n % 3}", "text": "" if torch else f"k{n % 50}", "structure": f"s{n % 50}",
        "operations": [2 * n, 2 * n + 1], "sources": [n % 40], "reads": [[f"v{n - 1}", "f32[64, 64]", 16384, 16384]],
        "writes": [[f"v{n}", "f32[64, 64]", 16384, 16384]], "bytes": 32768, "fewest": 32768, "flops": 4096 * (n % 3), "seconds": took,
        "limit": took / 3, "kind": ("memory", "latency", "launch", "arithmetic")[n % 4], "reason": "left to the vendor's library" if torch else "",
        "schedule": "" if torch else "parallel(i0) vector(i1)", "programs": "", "registers": None, "spilled": None, "shared": None, "how": "cache",
        "compile_seconds": 0.0}


def drawing(name: str, kernels: int, nasty: str = "") -> dict:
    nodes = [node(n) for n in range(kernels)]
    operations = [{"name": f"o{i}", "op": nasty or ("add.Tensor", "mul.Tensor")[i % 2], "module": nodes[i // 2]["module"], "source": i % 40,
                   "bytes": 49152, "reads": [i - 1] if i else []} for i in range(2 * kernels)]
    why = lambda n, text: text if n % 5 == 4 else ""
    links = [{"made": n - 1, "used": n, "value": f"v{n - 1}", "bytes": 16384, "code": why(n, "opaque"), "kind": why(n, "illegal"),
              "reason": why(n, "one side is a call of torch, not a kernel")} for n in range(1, kernels)]
    return {"name": name, "phase": name.split("_")[0], "capture": "0/0", "eager": "", "operations": operations, "nodes": nodes, "links": links}


def row(d: dict, n: dict) -> dict:
    same = ("name", "module", "seconds", "bytes", "fewest", "flops", "limit", "kind", "schedule", "registers", "spilled")
    return {**{name: n[name] for name in same}, "phase": d["phase"], "source": "model.py:3  return x + 1", "calls": 1, "opaque": n["reason"],
            "dtype": "float32", "positions": [[d["name"], n["position"]]], "fraction": n["limit"] / n["seconds"], "wasted": n["seconds"] - n["limit"]}


def side(step: float, drawings: list[dict], ours: bool) -> dict:
    timeline, at = [{"lane": "phase", "name": "forward", "start": 0.0, "seconds": step, "graph": "", "position": -1}], 0.0
    for d in drawings:
        for n in d["nodes"]:
            timeline.append({"lane": "kernel" if ours else "operator", "name": "" if ours else "add", "start": at, "seconds": n["seconds"],
                             "graph": d["name"] if ours else "", "position": n["position"] if ours else -1})
            at += n["seconds"]
    return {"step": step, "host": step, "busy": at, "phases": {"forward": step}, "kernels": len(timeline) - 1, "bytes": 10 ** 9, "peak": 2 ** 20,
            "middle": [step * 0.9, step * 1.1], "timeline": timeline,
            "memory": {"peak": 2 ** 20, "curve": [[0.0, 0], [step / 2, 2 ** 20], [step, 2 ** 18]], "phases": []}}


def profile(kernels: int = 60, nasty: str = "") -> dict:
    """The data of a profile of so many kernels, in two graphs; `nasty` stands wherever the user's text may."""
    drawings = [drawing("forward_0", kernels // 2, nasty), drawing("backward_1", kernels - kernels // 2, nasty)]
    step = sum(n["seconds"] for d in drawings for n in d["nodes"]) * 1.2
    sources = [{"file": f"/somewhere/{nasty or 'model.py'}", "line": i + 1, "code": nasty or f"x = x + {i}"} for i in range(40)]
    edges = [{"edge": {"producer": f"{li['value']} (mm)", "consumer": nasty or "v", "code": "opaque", "kind": "illegal", "reason": li["reason"],
                       "bytes": li["bytes"], "made": sources[0], "used": sources[1], "graph": d["name"]}, "seconds": 1e-6}
             for d in drawings for li in d["links"] if li["code"]]
    rows = sorted((row(d, n) for d in drawings for n in d["nodes"]), key=lambda r: -r["wasted"])
    return {
        "format": "tokamak profile 1", "title": nasty or "model.py", "device": "cpu", "peaks": peaks(), "eager": side(2 * step, drawings, False),
        "compiled": side(step, drawings, True), "bound": "memory", "why": "80% of the time in kernels is of that class", "fewest": 10 ** 8,
        "first": 2.5, "stages": {"capture": 0.1, "build": 0.5}, "cached": 3, "built": 50, "rows": rows, "edges": edges,
        "advice": [{"what": "graph break", "place": nasty or "model.py:7", "reason": nasty or "print", "mend": "do not"}], "opaque": kernels // 5,
        "graphs": 2, "notes": [], "step": nasty, "next": nasty, "beside": 0.0,
        "predicted": 2 ** 20, "held": [{"graph": "forward_0", "position": n, "bytes": 2 ** 19 + n} for n in range(20)],
        "drawings": drawings, "sources": sources, "files": {s["file"]: {str(x["line"]): x["code"] for x in sources} for s in sources[:1]},
        "texts": {f"k{i}": {"ir": nasty or f"graph g {{\n  %v{i} = add(%a, %b)\n}}", "code": nasty or "// a kernel\nfloat x = 1.0f;",
                            "of": "forward_0: poi_fused_add_mul_0"} for i in range(50)},
        "coverage": [{"graph": "forward_0", "held": 20, "total": 22, "pieces": 2, "left": [["item", nasty or "it waits"]], "calls": "3 replays"}],
        "others": [{"name": nasty or "Memcpy DtoD", "calls": 3.0, "seconds": 1e-5}], "took": 3.0, "about": {"torch": "2.13"}, "metrics": {},
        "lines": [{"source": sources[i], "seconds": 1e-3 / (i + 1), "wasted": 1e-4, "count": 3} for i in range(20)]}
