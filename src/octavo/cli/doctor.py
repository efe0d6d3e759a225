"""`octavo doctor`: what this machine has, and what of FP8 it runs natively or by emulation."""

from __future__ import annotations

import json
import platform
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from octavo.study.environment import device_name, has_native_fp8, usable_cpus, version_of
from octavo.study.half_precision import needs_fp32_products
from octavo.version import __version__

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def diagnose() -> dict[str, Any]:
    """The findings as plain data."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    capability = ".".join(map(str, torch.cuda.get_device_capability())) if device.type == "cuda" else None
    native = has_native_fp8(device)
    return {
        "octavo": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "cuda_of_torch": torch.version.cuda,
        "device": device.type,
        "device_name": device_name(device),
        "compute_capability": capability,
        "cpu_count": usable_cpus(),
        "fp8_products": "native" if native else "emulated",
        "fp8_casts": "Triton" if device.type == "cuda" and version_of("triton") else "PyTorch",
        "bf16_products": "fp32 products of rounded operands"
        if needs_fp32_products(device, torch.bfloat16)
        else "native",
        "study_extra": {name: version_of(name) for name in ("tokenizers", "safetensors", "plotly", "rich", "typer")},
        "transformer_engine": version_of("transformer_engine"),
        "transformers": version_of("transformers"),
    }


def doctor(as_json: JsonOption = False) -> None:
    """Say what this machine has, and what of FP8 it runs natively or by emulation.

    Example: [bold]octavo doctor --json[/bold]
    """
    findings = diagnose()
    if as_json:
        typer.echo(json.dumps(findings, indent=1))
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for key, value in findings.items():
        if isinstance(value, dict):
            value = ", ".join(f"{name} {version or 'missing'}" for name, version in value.items())
        table.add_row(key.replace("_", " "), "none" if value is None else str(value))
    Console().print(table)
