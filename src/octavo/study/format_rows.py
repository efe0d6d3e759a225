"""The table of formats and the four-way cast of some numbers, from the library itself rather than from a book."""

from __future__ import annotations

import torch

from octavo.formats import E4M3, E5M2, cast, decode, finfo
from octavo.study.record import Row

_E4M3_MAX, _E5M2_MAX = finfo(E4M3).max, finfo(E5M2).max
_EXAMPLES = (
    *(1.0, 0.1, 3.14159265, 17.3, 240.0),
    *(_E4M3_MAX, _E4M3_MAX + 17, 1000.0, _E5M2_MAX, _E5M2_MAX + 12_656),  # at the limits and beyond
    *(0.002, 0.0009, 1e-5, 1e-8),
)


def format_rows() -> list[Row]:
    """One `format` row each of fp32, bf16, fp16, E4M3 and E5M2."""
    rows: list[Row] = []
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        info = torch.finfo(dtype)
        rows.append(
            {
                "kind": "format",
                "name": name,
                "bits": info.bits,
                "max": info.max,
                "smallest_normal": info.smallest_normal,
                "smallest_subnormal": info.smallest_normal * info.eps,
                "eps": info.eps,
            }
        )
    for name, format in (("E4M3", E4M3), ("E5M2", E5M2)):
        limits = finfo(format)
        rows.append(
            {
                "kind": "format",
                "name": name,
                "bits": limits.bits,
                "max": limits.max,
                "smallest_normal": limits.smallest_normal,
                "smallest_subnormal": limits.smallest_subnormal,
                "eps": limits.eps,
            }
        )
    return rows


def cast_rows() -> list[Row]:
    """One `cast_example` row a number: what each format stores of it without a scale, in decimal."""
    values = torch.tensor(_EXAMPLES, dtype=torch.float64)
    stored = {
        "fp32": values.float(),
        "bf16": values.bfloat16(),
        "e4m3": decode(cast(values.float(), E4M3)),
        "e5m2": decode(cast(values.float(), E5M2)),
    }
    return [
        {
            "kind": "cast_example",
            "value": f"{value:g}",
            **{name: f"{float(tensor[index]):.9g}" for name, tensor in stored.items()},
        }
        for index, value in enumerate(_EXAMPLES)
    ]
