"""Rows of studies that never ran: fictional figures of a plausible shape, only for tests of the report."""

from __future__ import annotations

import math
import random
from typing import Any

Row = dict[str, Any]

FINETUNED = ("delayed", "current", "rowwise")
OPERANDS = ("input", "weight", "grad_output")

# key, label, weights, activations, change of perplexity in per cent, share of the 16-bit weight memory, speed factor
PTQ = [
    ("bf16", "BF16", "BF16", "BF16", 0.0, 1.0, 1.0),
    ("tensor_static", "FP8 tensor, static", "E4M3, per tensor", "E4M3, calibrated", 0.71, 0.5, 1.32),
    ("tensor_dynamic", "FP8 tensor, dynamic", "E4M3, per tensor", "E4M3, per tensor", 0.62, 0.5, 1.21),
    ("rowwise", "FP8 row-wise", "E4M3, per channel", "E4M3, per token", 0.41, 0.502, 1.27),
    ("block128", "FP8 block 128", "E4M3, 128 x 128", "E4M3, 1 x 128", 0.38, 0.501, 0.9),
    ("mxfp8", "MXFP8", "E4M3, 1 x 32", "E4M3, 1 x 32", 0.47, 0.516, 0.2),
    ("int8", "INT8", "INT8, per channel", "INT8, per token", 0.93, 0.502, 0.4),
    ("int4", "INT4 weights", "INT4, group 128", "BF16", 6.8, 0.266, 0.3),
]


def layer_names(num_layers: int) -> list[str]:
    parts = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    return [f"transformer.h.{index}.{part}" for index in range(num_layers) for part in parts]


def run_rows(native: bool) -> list[Row]:
    return [
        {
            "kind": "run",
            "octavo_version": "0.0.0",
            "python": "3.11.9",
            "torch": "2.13.0" if not native else "2.11.0+cu130",
            "triton": "3.6.0" if native else None,
            "device": "cuda" if native else "cpu",
            "device_name": "Fictional GPU 141GB" if native else "Fictional CPU @ 2.00GHz",
            "cpu_count": 16 if native else 2,
            "native_fp8": native,
            "command": ["octavo", "study", "--preset", "gpt2" if native else "tiny", "--out", "a folder"],
            "date": "2020-02-29T12:34:56+00:00",
            "seed": 0,
            "preset": "gpt2" if native else "tiny",
            "time_limit_s": 480 if native else None,
            "git_commit": "0123456789abcdef0123456789abcdef01234567",
        },
        {
            "kind": "data",
            "name": "docs",
            "source": "pydoc_data.topics and docstrings of the standard library, Python 3.11.9",
            "documents": 8123,
            "bytes": 2345678,
            "sha256": "00ff" * 16,
            "tokens": {"train": 612345, "validation": 34567, "test": 35678},
            "vocab_size": 2048,
        },
        {
            "kind": "model",
            "preset": "gpt2" if native else "tiny",
            "parameters": 124_439_808 if native else 1_315_000,
            "layers": 12 if native else 4,
            "width": 768 if native else 128,
            "heads": 12 if native else 4,
            "context": 1024 if native else 128,
            "vocab_size": 50304 if native else 2048,
        },
    ]


def training_rows(rng: random.Random, phase: str, methods: tuple[str, ...], seeds: range, steps: int) -> list[Row]:
    rows: list[Row] = []
    for seed in seeds:
        for method in methods:
            offset = {"bf16": 0.0, "delayed": 0.004, "current": 0.002, "rowwise": 0.001}[method]
            for step in range(1, steps + 1):
                share = step / steps
                if phase == "baseline":
                    level = 3.2 + 4.4 * math.exp(-6 * share) + 0.5 * (1 - share)
                else:
                    level = 3.2 - 0.06 * share
                noise = random.Random(1000 * seed + step).gauss(0, 0.06)  # same data order: same noise in each method
                loss = level + offset + noise + 0.02 * seed
                row = {"phase": phase, "method": method, "seed": seed, "step": step}
                warmup = min(1.0, step / (0.05 * steps))
                rows.append(
                    {
                        "kind": "train_step",
                        **row,
                        "loss": round(loss, 4),
                        "lr": 1e-3 * warmup * (0.1 + 0.9 * (1 + math.cos(math.pi * share)) / 2),
                        "grad_norm": round(abs(rng.gauss(0.8, 0.2)), 3),
                        "tokens_per_s": round(rng.gauss(9000, 300), 1),
                    }
                )
                if step % max(1, steps // 12) == 0 or step == 1:
                    validation = level + offset + 0.05 + rng.gauss(0, 0.002) + 0.02 * seed
                    rows.append(
                        {
                            "kind": "validation",
                            **row,
                            "loss": round(validation, 4),
                            "perplexity": round(math.exp(validation), 3),
                        }
                    )
    return rows


def ptq_rows(rng: random.Random, seeds: range, native: bool) -> list[Row]:
    rows: list[Row] = []
    for seed in seeds:
        base = 27.4 + 0.3 * seed
        for key, label, weights, activations, change, share, factor in PTQ:
            runs_native = native and key in ("tensor_static", "tensor_dynamic", "rowwise")
            execution = "high precision" if key == "bf16" else "native" if runs_native else "emulated"
            noise = 0.0 if key == "bf16" else rng.gauss(0, 0.05)
            perplexity = base * (1 + (change + noise) / 100)
            linear_bytes = (170_000_000 if native else 1_600_000) * share
            speed = factor if native else {"bf16": 1.0}.get(key, 0.35) * rng.uniform(0.9, 1.1)
            rows.append(
                {
                    "kind": "ptq",
                    "method": key,
                    "label": label,
                    "weights": weights,
                    "activations": activations,
                    "perplexity": perplexity,
                    "accuracy": 0.3912 - change / 400 + 0.001 * seed,
                    "loss": math.log(perplexity),
                    "weight_bytes": int(linear_bytes),
                    "model_bytes": int(linear_bytes + (79_000_000 if native else 560_000)),
                    "load_s": 0.021 + 0.01 * share,
                    "ttft_s": 0.0123 / speed,
                    "prefill_tokens_per_s": (812_345.0 if native else 20_123.0) * speed,
                    "decode_tokens_per_s": (3456.0 if native else 512.0) * speed,
                    "execution": execution,
                    "seed": seed,
                    "note": "KV cache stays BF16" if key == "mxfp8" else None,
                }
            )
    return rows


def layer_rows(rng: random.Random, num_layers: int) -> list[Row]:
    base = {
        "tensor_static": 27.0,
        "tensor_dynamic": 28.0,
        "rowwise": 30.5,
        "block128": 31.0,
        "mxfp8": 30.0,
        "int8": 33.0,
        "int4": 21.0,
    }
    rows: list[Row] = []
    for method, level in base.items():
        for index, layer in enumerate(layer_names(num_layers)):
            dip = 6.0 if layer.endswith("mlp.c_proj") else 0.0
            rows.append(
                {
                    "kind": "layer_error",
                    "method": method,
                    "layer": layer,
                    "weight_sqnr_db": level + 3.2 + rng.gauss(0, 0.3),
                    "input_sqnr_db": level + 1 - dip + rng.gauss(0, 0.5),
                    "output_sqnr_db": level - dip - 0.02 * index + rng.gauss(0, 0.4),
                    "input_amax": abs(rng.gauss(6 + 4 * dip, 1)),
                    "underflow": None if method == "int8" else abs(rng.gauss(0.004, 0.002)),
                    "saturation": abs(rng.gauss(0.0002, 0.0001)) if method == "tensor_static" else 0.0,
                }
            )
    return rows


def finetune_rows(rng: random.Random, seeds: range, steps: int, native: bool) -> list[Row]:
    gaps = {"bf16": 0.0, "delayed": 0.09, "current": 0.05, "rowwise": 0.02}
    served = {
        "bf16": "bf16",
        "delayed": "tensor_static",
        "current": "tensor_dynamic",
        "rowwise": "rowwise",
    }
    rows: list[Row] = []
    for seed in seeds:
        base = 25.9 + 0.3 * seed
        for method, gap in gaps.items():
            noise = 0.0 if method == "bf16" else rng.gauss(0, 0.04)
            perplexity = base * (1 + (gap + noise) / 100)
            speed = {"bf16": 1.0, "delayed": 1.2, "current": 1.1, "rowwise": 1.05}[method] if native else 1.0
            rows.append(
                {
                    "kind": "finetune",
                    "method": method,
                    "seed": seed,
                    "steps": steps,
                    "perplexity": perplexity,
                    "perplexity_bf16_serving": perplexity * 0.9995,
                    "loss": math.log(perplexity),
                    "accuracy": 0.401 - gap / 400,
                    "steps_per_s": (14.2 if native else 6.1 if method == "bf16" else 2.3) * speed,
                    "peak_memory_bytes": (9.1e9 if method == "bf16" else 8.2e9) if native else None,
                    "execution": "high precision" if method == "bf16" else "native" if native else "emulated",
                    "served_as": served[method],
                }
            )
    return rows


def scale_rows(rng: random.Random, seeds: range, steps: int, num_layers: int) -> list[Row]:
    largest = 1.75 * 2.0**8
    rows: list[Row] = []
    for seed in seeds:
        for method in ("delayed", "current"):
            for layer in layer_names(num_layers):
                levels = {
                    "input": rng.uniform(3, 20),
                    "weight": rng.uniform(0.2, 0.5),
                    "grad_output": rng.uniform(1e-5, 1e-3),
                }
                window: dict[str, list[float]] = {operand: [] for operand in OPERANDS}
                for step in range(1, steps + 1):
                    for operand in OPERANDS:
                        noise = random.Random(f"{seed} {layer} {operand} {step}").gauss(0, 1)  # alike in each method
                        wobble = math.exp(noise * (0.02 if operand == "weight" else 0.2) + rng.gauss(0, 0.01))
                        spike = 12.0 if operand == "grad_output" and step == steps // 2 else 1.0
                        amax = levels[operand] * wobble * spike
                        seen = window[operand][-16:] or [amax]
                        used = max(seen) if method == "delayed" else amax
                        window[operand].append(amax)
                        rows.append(
                            {
                                "kind": "scale_history",
                                "method": method,
                                "seed": seed,
                                "step": step,
                                "layer": layer,
                                "operand": operand,
                                "amax": amax,
                                "scale": used / largest,
                            }
                        )
    return rows


def claim_rows(native: bool) -> list[Row]:
    return [
        {
            "kind": "claim",
            "claim": "FP8 costs 1 to 2 % of accuracy",
            "source": "vendors' guides to serving",
            "claimed": "1 to 2 % of accuracy",
            "measured": "0.1 percentage points of next-token accuracy (row-wise)",
            "held": False,
            "why": "it costs less: the claim is about harder tasks than the next token",
        },
        {
            "kind": "claim",
            "claim": "Perplexity rises by less than 0.5",
            "source": "papers on FP8 inference",
            "claimed": "< 0.5",
            "measured": "+0.11 (row-wise, three seeds)",
            "held": True,
            "why": "largest over the FP8 methods: +0.19",
        },
        {
            "kind": "claim",
            "claim": "1.8 times the tokens per second",
            "source": "vendors' guides to serving",
            "claimed": "1.8 times",
            "measured": "1.27 times (decode, row-wise)" if native else "\u2014",
            "held": False if native else None,
            "why": "small matrices gain less" if native else "FP8 is emulated on this machine",
        },
    ]


def fact_rows() -> list[Row]:
    formats = [
        ("fp32", 32, 3.4028234663852886e38, 2.0**-126, 2.0**-149, 2.0**-23),
        ("bf16", 16, 3.3895313892515355e38, 2.0**-126, 2.0**-133, 2.0**-7),
        ("fp16", 16, 65504.0, 2.0**-14, 2.0**-24, 2.0**-10),
        ("E4M3", 8, 1.75 * 2.0**8, 2.0**-6, 2.0**-9, 2.0**-3),
        ("E5M2", 8, 1.75 * 2.0**15, 2.0**-14, 2.0**-16, 2.0**-2),
    ]
    names = ("max", "smallest_normal", "smallest_subnormal", "eps")
    rows: list[Row] = [
        {"kind": "format", "name": name, "bits": bits, **dict(zip(names, limits, strict=True))}
        for name, bits, *limits in formats
    ]
    casts = [
        ("0.1", "0.1", "0.10009765625", "0.1015625", "0.09375"),
        ("1.3", "1.3", "1.296875", "1.25", "1.25"),
        ("300", "300", "300", "288", "320"),
        ("0.0007", "0.0007", "0.00069809", "0", "0.000732"),
    ]
    rows += [
        {"kind": "cast_example", **dict(zip(("value", "fp32", "bf16", "e4m3", "e5m2"), texts, strict=True))}
        for texts in casts
    ]
    return rows


def phase_rows(names: tuple[str, ...] = ("data", "baseline", "ptq", "finetune", "report")) -> list[Row]:
    rows: list[Row] = [
        {"kind": "phase", "name": name, "seconds": 12.5 * (index + 1), "status": "done", "note": None}
        for index, name in enumerate(names)
    ]
    rows[-1] = {**rows[-1], "status": "shrunk", "note": "fewer steps than wanted"}
    return rows


def study(native: bool = False, num_seeds: int = 3, steps: int = 120) -> list[Row]:
    """Every kind of row: a small study on a CPU, or (native) a larger one on a GPU."""
    rng = random.Random(20200229)
    seeds, num_layers = range(num_seeds), 12 if native else 4
    return [
        *run_rows(native),
        {
            "kind": "adjustment",
            "phase": "finetune",
            "what": "steps",
            "wanted": 400,
            "used": steps,
            "why": "the time limit leaves 55 s for this phase",
        },
        *training_rows(rng, "baseline", ("bf16",), seeds, 4 * steps),
        *ptq_rows(rng, seeds, native),
        *layer_rows(rng, num_layers),
        *training_rows(rng, "finetune", ("bf16", *FINETUNED), seeds, steps),
        *finetune_rows(rng, seeds, steps, native),
        *scale_rows(rng, range(1), steps, num_layers),
        *claim_rows(native),
        *fact_rows(),
        *phase_rows(),
    ]


def interrupted() -> list[Row]:
    """A study that was stopped while it trained its baseline."""
    rng = random.Random(7)
    return [*run_rows(False), *training_rows(rng, "baseline", ("bf16",), range(1), 60), *fact_rows()]


def hostile() -> list[Row]:
    """A study whose texts try to leave their place on the page, and whose figures are absent or absurd."""
    attack = "</script><script>window.attacked = true</script><img src=x onerror='window.attacked = true'>"
    rows = study(num_seeds=2, steps=24)
    texts = {
        "label",
        "layer",
        "note",
        "why",
        "claim",
        "source",
        "name",
        "device_name",
        "served_as",
        "weights",
        "measured",
    }
    changed: list[Row] = []
    for index, row in enumerate(rows):
        row = {key: f"{value} {attack}" if key in texts and value else value for key, value in row.items()}
        if row["kind"] == "ptq" and index % 3 == 0:
            row["decode_tokens_per_s"] = row["ttft_s"] = None
        changed.append(row)
    return [*changed, {"no": "kind"}, {"kind": "of a later version", "value": 1}]
