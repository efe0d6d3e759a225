"""What the figures belong to: the `run` row, with hardware, versions, commit and the habits of measuring."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from octavo.bench.cuda_graphs import l2_bytes
from octavo.bench.record import Row
from octavo.bench.settings import BenchSettings
from octavo.version import __version__

LIBRARIES = ("triton", "transformer_engine", "torchao", "timm", "transformers")

PROTOCOL = {
    "data": "N(0, 1), inputs take turns so that all of them together are at least twice the L2 cache",
    "gpu_time": "CUDA-graph replays, rivals taking turns, first rounds dropped, median of the rest; where a call cannot"
    " be captured the sum of its kernels' times, marked in its row",
    "copy": "matrices of BF16 at several sizes, all larger than the L2 cache; the fastest is the ceiling",
    "linear": "forward and backward by torch.autograd.grad, bias off, bf16 parameters; of delayed scaling without the"
    " update of scales, which is one for a whole model and step",
    "host_time": "time until the calls return, the queue empty before, gradients set to None in each call",
    "steps": "AdamW fused, torch.autocast bf16, fp32 parameters; zero_grad(set_to_none=True) before the"
    " forward; wall time, synchronised after each step; compiled: one region a block, with delayed scaling after three"
    " eager steps, in which scales become known (else three graphs are compiled one after another)",
    "memory": "the largest allocation during the measured steps, of one model alone: the others freed before; of steps"
    " that replay what was recorded, from before the recording on",
    "layers": "forward and backward of one TransformerLayer, bf16 parameters, causal, no dropout; wall: calls in a row"
    " until the device is done; host: until they return, the queue empty before; memory: of the layer, its gradients"
    " and a step, since the layer was built",
    "inference": "random weights, greedy, StaticCache; prefill: replay of a CUDA graph, keys and values kept, the head"
    " for the last token; decode: a graph a token, many in a row; first token: host's clock, from prompts in the host's"
    " memory to the token there; loading: from safetensors in the page cache; memory: weights, cache and a call",
}


def run_row(settings: BenchSettings, command: list[str]) -> Row:
    """The `run` row of a bench that starts now."""
    device = torch.device(settings.device)
    cuda = device.type == "cuda"
    native = cuda and torch.cuda.get_device_capability(device) >= (8, 9)
    return {
        "kind": "run",
        "octavo_version": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **{name: version_of(name) for name in LIBRARIES},
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if cuda else _processor(),
        "device_memory_gib": round(torch.cuda.get_device_properties(device).total_memory / 2**30, 1) if cuda else None,
        "l2_bytes": l2_bytes(device),
        "driver": _driver() if cuda else None,
        "cpu_count": os.cpu_count(),
        "native_fp8": native,
        "command": command,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "seed": settings.seed,
        "quick": settings.quick,
        "only": list(settings.only),
        "time_limit_s": settings.time_limit_s,
        "git_commit": settings.commit or _commit(),
        "protocol": dict(PROTOCOL),
    }


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _said(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _commit() -> str | None:
    """The commit of the checkout this package lies in, or None for an installed copy."""
    folder = Path(__file__).resolve().parents[3]
    return _said("git", "-C", str(folder), "rev-parse", "HEAD") if (folder / ".git").exists() else None


def _driver() -> dict[str, Any] | None:
    """Driver version, power limit and largest clock of the first device, as nvidia-smi says them."""
    names = ("driver_version", "power.limit", "clocks.max.sm")
    said = _said("nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader")
    if said is None:
        return None
    values = said.splitlines()[0].split(", ")
    return dict(zip((name.replace(".", "_") for name in names), values, strict=False))


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
