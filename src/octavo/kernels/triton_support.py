"""Whether the Triton twin of a kernel can run for a tensor; Triton itself is imported only then."""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

from octavo.formats import E4M3, E5M2, Format


@functools.cache
def triton_is_installed() -> bool:
    """True if `import triton` would find a package."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def device_reasons(device: torch.device) -> list[str]:
    """Why Octavo's Triton kernels do not run on `device`; empty if they do."""
    if device.type != "cuda":
        return [f"the tensor is on {device.type}: Triton kernels need a CUDA device"]
    if not triton_is_installed():
        return ["Triton is not installed: pip install octavo[gpu]"]
    major, minor = _capability(device.index or 0)
    if (major, minor) < (9, 0):
        # PTX for sm_89 rounds the conversion from float32 by way of fp16 toward zero; older cards have no conversion.
        return [f"compute capability {major}.{minor}: exact FP8 conversion needs 9.0 (Hopper) or later"]
    return []


@functools.cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def multiprocessors(x: Tensor) -> int:
    """How many x's device has; on a CPU, where kernels are interpreted, 1."""
    return _multiprocessors(x.device.index or 0) if x.is_cuda else 1


@functools.cache
def runs_on(index: int | None, format_name: str = E4M3.name) -> bool:
    """True if CUDA device `index` runs the Triton kernels, for codes of the format called so."""
    return format_name in (E4M3.name, E5M2.name) and not device_reasons(torch.device("cuda", index or 0))


def runs_compiled(index: int | None, format_name: str = E4M3.name) -> bool:
    """`runs_on` for code that is being traced."""
    return runs_on(index, format_name)


# Dynamo runs it while it traces, which it would not do for what functools.cache makes.
# (torch.compiler.assume_constant_result sets this, and imports Dynamo to do so.)
runs_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]


def runs_inductor(x: Tensor, columns: int, format_name: str = E4M3.name) -> bool:
    """True if Inductor is to see and launch a cast to [rows of x, columns] itself: traced, on a GPU that runs it."""
    # Inductor makes a constant of a 1, also of the number of rows: see `one_column_reasons`.
    return x.is_cuda and x.shape[0] != 1 and columns != 1 and runs_compiled(x.device.index, format_name)


def one_column_reasons(x: Tensor) -> list[str]:
    """Why casts of a matrix of one column are left to the reference.

    Triton makes a constant of an integer argument that is 1. With that, all but one of the values that a thread
    converts are a constant 0, and ptxas 12.8 (Triton 3.6) then puts what a register held before in the place of their
    codes, though the PTX is right (seen on an H200: check_kernels.py, shapes [257, 1] and [1, 1]).
    """
    return ["a matrix of one column: ptxas 12.8 miscompiles the conversion"] if x.shape[1] == 1 else []


def cast_reasons(x: Tensor, format: Format) -> list[str]:
    """Why Triton twins do not cast a matrix x to a format; empty if they do."""
    reasons = device_reasons(x.device) + one_column_reasons(x)
    if format not in (E4M3, E5M2):
        reasons.append(f"format {format.name}: NVIDIA's conversion instructions write E4M3 and E5M2")
    return reasons


def uses_triton(x: Tensor) -> bool:
    """True if the Triton twin runs for x."""
    return x.is_cuda and runs_on(x.device.index)
