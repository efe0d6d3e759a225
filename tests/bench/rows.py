"""Rows as a run on a GPU would record them, with figures that are round, and not measured."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]
GRAPH = "CUDA graph replay"


def run(native: bool = True) -> Row:
    return {
        "kind": "run",
        "native_fp8": native,
        "device": "cuda" if native else "cpu",
        "device_name": "A card" if native else "A processor",
        "octavo_version": "0.0",
        "date": "2026-01-02T03:04:05+00:00",
        "command": ["octavo", "bench", "--time-limit", "8m"],
        "driver": {"driver_version": "1.2", "power_limit": "700 W"},
        "protocol": {"data": "N(0, 1)"},
    }


def linear(rival: str, ms: float | None, shape: tuple[int, int, int] = (8192, 768, 3072), **more: Any) -> Row:
    library = "torch" if rival.startswith(("bf16", "gemms")) else rival.partition("-")[0]
    about = {"kind": "linear", "shape": list(shape), "rival": rival, "library": library, "recipe": "", "method": GRAPH}
    if ms is None:
        return about | {"status": "failed", "reason": "RuntimeError: no kernel image"} | more
    figures = {"ms": ms, "ms_p10": 0.9 * ms, "ms_p90": 1.1 * ms, "speedup": 8.0 / ms, "per_s": 1e15, "of_peak": 0.5}
    return about | {"status": "measured", "reason": None} | figures | more


def step(rival: str, ms: float | None, model: str = "vit", **more: Any) -> Row:
    library = "torch" if rival.startswith("bf16") else rival.partition("-")[0]
    about = {"kind": "step", "model": model, "rival": rival, "library": library, "batch": 32, "method": "wall"}
    about |= {"graph": "captured" if rival.endswith("captured") else "", "repeat": False}
    if ms is None:
        return about | {"status": "skipped", "reason": "time limit"} | more
    figures = {"ms": ms, "ms_p10": ms, "ms_p90": ms, "per_s": 32e3 / ms, "unit": "images/s", "peak_gib": 20.0}
    return about | {"status": "measured", "reason": None, "warm_s": 20.0, "converted": 128} | figures | more


def layer(rival: str, ms: float | None, **more: Any) -> Row:
    library, graph = "torch" if rival.startswith("bf16") else rival.partition("-")[0], "graphed"
    recipe = "" if "bf16" in rival else rival.split("-")[1]
    about = {"kind": "layer", "shape": [1024, 8, 768, 3072, 12], "rival": rival, "library": library, "recipe": recipe}
    about |= {"graph": graph if rival.endswith(graph) else "", "method": "wall"}
    if ms is None:
        return about | {"status": "skipped", "reason": "time limit"} | more
    figures = {"ms": ms, "ms_p10": ms, "ms_p90": ms, "host_us": 500 * ms, "peak_gib": 1.0, "per_s": 8192e3 / ms}
    return about | {"status": "measured", "reason": None, "unit": "tokens/s"} | figures | more


def host(rival: str, us: float, ratio: float) -> Row:
    library = "torch" if rival == "bf16" else rival.partition("-")[0]
    about = {"kind": "host", "shape": [256, 1024, 1024], "rival": rival, "library": library, "method": "host"}
    return about | {"pass": "forward+backward", "status": "measured", "reason": None, "us": us, "ratio": ratio}


def cast(name: str, of_copy: float, shape: tuple[int, int] = (16384, 8192)) -> Row:
    about = {"kind": "cast", "name": name, "shape": list(shape), "method": GRAPH, "status": "measured", "reason": None}
    return about | {
        "ms": 0.1,
        "ms_p10": 0.1,
        "ms_p90": 0.1,
        "per_s": of_copy * 4e12,
        "of_copy": of_copy,
        "of_same_copy": of_copy,
    }


def section(name: str) -> Row:
    return {"kind": "section", "name": name, "seconds": 12.5, "status": "done", "reason": None}


def whole() -> list[Row]:
    """A record with something of everything."""
    ceiling = {
        "kind": "ceiling",
        "name": "copy",
        "shape": [1 << 30],
        "status": "measured",
        "per_s": 4e12,
        "unit": "B/s",
    }
    linears = [linear("gemms", 4.0), linear("bf16", 8.0), linear("octavo-delayed", 5.0, target_ms=5.5)]
    linears += [linear("te-delayed", 6.0), linear("te-block", None), linear("octavo-current", 5.8, target_ms=5.6)]
    steps = [step("bf16", 104.0), step("bf16-compiled", 86.0), step("octavo-delayed-compiled", 70.0, peak_gib=15.0)]
    steps += [step("te-delayed", 117.0), step("torchao-tensorwise-compiled", None)]
    steps += [step("bf16-compiled", 88.0, repeat=True), step("octavo-delayed-compiled-captured", 60.0, peak_gib=18.0)]
    batch = {"kind": "batch_limit", "model": "vit", "rival": "bf16-compiled", "limit_gib": 20.0, "batch": 28}
    batch |= {"status": "measured", "reason": None, "peak_gib": 19.5, "ms": 80.0, "per_s": 350.0, "unit": "images/s"}
    others = [cast("copy", 1.0), cast("delayed", 0.91), cast("delayed", 0.8, (8192, 768)), cast("rowwise", 0.7)]
    hosts = [host("bf16", 190.0, 1.0), host("octavo-delayed", 570.0, 3.0), host("te-delayed", 1500.0, 7.9)]
    layers = [
        layer("bf16", 6.0),
        layer("octavo-delayed", 4.0),
        layer("te-delayed", 8.0),
        layer("te-block-graphed", None),
    ]
    inference = [served("bf16", 15.0), served("octavo-rowwise", 9.0)]
    figures = [*others, *linears, *hosts, *steps, *layers, *inference, batch]
    return [run(), ceiling, *figures, section("casts"), section("steps")]


def served(rival: str, ms: float | None, phase: str = "prefill", model: str = "llama", **more: Any) -> Row:
    library = "torch" if rival.startswith(("bf16", "fp16")) else rival.partition("-")[0]
    graph = "" if phase == "loading" else "replayed"
    about = {"kind": "inference", "model": model, "phase": phase, "batch": 1, "tokens": 2048, "graph": graph}
    about |= {"rival": rival, "library": library, "recipe": "", "method": GRAPH}
    if ms is None:
        return about | {"status": "failed", "reason": "RuntimeError: no kernel image"} | more
    products = "bf16" if library == "torch" else "row"
    figures = {"ms": ms, "ms_p10": ms, "ms_p90": ms, "per_s": 2048e3 / ms, "unit": "tokens/s", "peak_gib": 5.0}
    figures |= {"weight_bytes": 4_000_000_000 if products == "bf16" else 2_000_000_000, "converted": 56}
    figures |= {
        "products": products,
        "linear_flops": 4e12,
        "other_flops": 0.0,
        "cast_bytes": 0 if library == "torch" else 4e9,
    }
    return about | {"status": "measured", "reason": None} | figures | more
