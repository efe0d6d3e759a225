"""Where a study ran: the `run` row, with versions, hardware and command, so that its figures can be judged."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch

from octavo.study.record import Row
from octavo.study.settings import StudySettings
from octavo.version import __version__


def run_row(settings: StudySettings, command: list[str]) -> Row:
    """The `run` row of a study that starts now."""
    device = torch.device(settings.device)
    return {
        "kind": "run",
        "octavo_version": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "device": device.type,
        "device_name": device_name(device),
        "cpu_count": usable_cpus(),
        "native_fp8": has_native_fp8(device),
        "command": command,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "seed": settings.seed,
        "preset": settings.preset,
        "time_limit_s": settings.time_limit_s,
        "git_commit": _git_commit(),
    }


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def usable_cpus() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def device_name(device: torch.device) -> str:
    """The name of the GPU or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def has_native_fp8(device: torch.device) -> bool:
    """Whether the device multiplies FP8 numbers itself (Ada, Hopper and later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _git_commit() -> str | None:
    """The commit of the checkout this package lies in, or None for an installed copy."""
    folder = Path(__file__).resolve().parents[3]
    if not (folder / ".git").exists():
        return None
    try:
        result = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()
