"""`octavo.emulation`: how a product without hardware support is computed.

The choice belongs to the thread that makes it. It lies where torch keeps what a backward's own threads take over from
the thread that calls it, so that it holds in a backward on a GPU too.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch

Emulation = Literal["auto", "fp32", "hopper"]
_CHOICES: tuple[str, ...] = get_args(Emulation)
_KEY = "octavo.emulation"


class emulation:
    """Context: how products of FP8 codes without hardware support are computed.

        with octavo.emulation("hopper"):
            loss = model(x).sum()
            loss.backward()

    Contexts nest and can be entered again; the innermost decides. Each thread has its own, and a backward follows the
    thread that calls it: what is in force when a product runs counts, not what was in force in its forward. Compiled
    code asks when it runs as well, so the context goes around the call, not into the compiled function.

    What runs on FP8 units stays there. Products of layers are reached under every recipe, by block too. Attention with
    FP8 operands, layers frozen with scales by block, and `octavo.scaled_mm` of granularities other than tensor and row,
    multiply decoded values whatever the choice.

    Args:
        choice: "fp32": products and sums in float32. "hopper": sums as Hopper's FP8 tensor cores make them, truncated
            to 13 fraction bits, bit by bit; slow. "auto": Octavo's choice, which is "fp32".

    Raises:
        ValueError: another choice.
        RuntimeError: entered while a function is being compiled.
    """

    def __init__(self, choice: Emulation) -> None:
        if choice not in _CHOICES:
            raise ValueError(f"emulation is {choice!r}: expected {', '.join(map(repr, _CHOICES))}")
        self.choice = choice

    def __enter__(self) -> emulation:
        if torch.compiler.is_compiling():
            raise RuntimeError("octavo.emulation goes around the call of a compiled function, not into it")
        torch._C._stash_obj_in_tls(_KEY, (*_entered(), self.choice))
        return self

    def __exit__(self, *error: Any) -> None:
        torch._C._stash_obj_in_tls(_KEY, _entered()[:-1])


def current_emulation() -> Literal["fp32", "hopper"]:
    """What is in force in this thread: "auto" is "fp32"."""
    return "hopper" if _entered()[-1:] == ("hopper",) else "fp32"


def _entered() -> tuple[str, ...]:
    """The choices of the contexts that this thread is in, the innermost last."""
    return tuple(torch._C._get_obj_in_tls(_KEY)) if torch._C._is_key_in_tls(_KEY) else ()
