"""What Triton compiles for a launch, without a device: the specialization it would take, and the machine code."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import create_function_from_signature

from octavo.kernels import sum_kernel

HOPPER, BLACKWELL, ADA = 90, 100, 89


class Launch(NamedTuple):
    """What a launcher was called with."""

    programs: int
    key: Any
    tensors: tuple[Tensor, ...]
    numbers: tuple[int, ...]
    constants: tuple[Any, ...]
    warps: int

    @property
    def arguments(self) -> tuple[Any, ...]:
        """All of the kernel's, in order."""
        return *self.tensors, *self.numbers, *self.constants


def launches_of(
    monkeypatch: pytest.MonkeyPatch, module: Any, launcher: str, call: Callable[[], object]
) -> list[Launch]:
    """What `call` would launch through a launcher of `module`; nothing runs."""
    launched: list[Launch] = []
    # What joins the sums of a launch that did not run.
    monkeypatch.setattr(sum_kernel, "_launch_join", lambda *_: None)
    monkeypatch.setattr(module, launcher, lambda *arguments: launched.append(Launch(*arguments)))
    call()
    return launched


def specialized(kernel: Any, launch: Launch, capability: int = HOPPER) -> list[tuple[str, Any]]:
    """For each argument its type and what Triton's own binder says of it ("D": a multiple of 16)."""
    bind = create_function_from_signature(
        kernel.signature, kernel.params, CUDABackend(GPUTarget("cuda", capability, 32))
    )
    _, specialization, _ = bind(*launch.arguments)
    return list(specialization)


def compiled(kernel: Any, launch: Launch, capability: int = HOPPER, **options: Any) -> Any:
    """The variant that Triton would compile for a launch, with options of its launcher's."""
    return _compiled(ASTSource, kernel, launch, capability, options)


def compiled_gluon(kernel: Any, launch: Launch) -> Any:
    """The same of a kernel in Gluon, for Hopper."""
    return _compiled(GluonASTSource, kernel, launch, HOPPER, {})


def _compiled(kind_of_source: Any, kernel: Any, launch: Launch, capability: int, options: dict[str, Any]) -> Any:
    names, kinds = kernel.arg_names, specialized(kernel, launch, capability)
    source = kind_of_source(
        fn=kernel,
        signature={name: kind for name, (kind, _) in zip(names, kinds, strict=True)},
        constexprs={(place,): value for place, (kind, value) in enumerate(kinds) if kind == "constexpr"},
        attrs={(place,): [["tt.divisibility", 16]] for place, (_, about) in enumerate(kinds) if about == "D"},
    )
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"num_warps": launch.warps, **options})


def stack_and_local_bytes(variant: Any, folder: Path) -> list[int]:
    """What a variant keeps in local memory, registers that do not fit included, by NVIDIA's own tool."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(variant.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    listing = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    sizes = re.findall(r"(?:STACK|LOCAL):(\d+)", listing)
    assert len(sizes) == 2, listing
    return [int(size) for size in sizes]
