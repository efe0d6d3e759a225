"""`octavo.emulation`: how a product without hardware support is computed.

The choice belongs to the thread that makes it. A backward on a GPU runs in threads of torch's own, which know no
caller: there the choice of whichever threads are inside of contexts holds.
"""

from __future__ import annotations

import threading
from typing import Any, Literal, get_args

import torch

Emulation = Literal["auto", "fp32", "hopper"]
_CHOICES: tuple[str, ...] = get_args(Emulation)
# By thread, the choices of the contexts that it is in, the innermost last; of threads that are in any.
_ENTERED: dict[int, tuple[str, ...]] = {}


class emulation:
    """Context: how products of FP8 codes without hardware support are computed.

        with octavo.emulation("hopper"):
            loss = model(x).sum()
            loss.backward()

    Contexts nest and can be entered again; the innermost decides. Each thread has its own, and a backward follows the
    thread that calls it: what is in force when a product runs counts, not what was in force in its forward. On a GPU
    torch runs a backward in threads of its own, which take the choice of the threads that are inside of such contexts.
    Compiled code asks when it runs as well, so the context goes around the call, not into the compiled function.

    What runs on FP8 units stays there. Products of layers are reached under every recipe, by block too. Attention with
    FP8 operands, layers frozen with scales by block, and `octavo.scaled_mm` of granularities other than tensor and row,
    multiply decoded values whatever the choice.

    Args:
        choice: "fp32": products and sums in float32. "hopper": sums as Hopper's FP8 tensor cores make them, truncated
            to 13 fraction bits, bit by bit; slow. "auto": Octavo's choice, which is "fp32".

    Raises:
        ValueError: another choice.
        RuntimeError: entered while a function is being compiled; or a product of a backward on a GPU asks while two
            threads are inside of contexts that differ.
    """

    def __init__(self, choice: Emulation) -> None:
        if choice not in _CHOICES:
            raise ValueError(
                f"emulation is {choice!r}: expected {', '.join(map(repr, _CHOICES))} (H100 and H200: 'hopper')"
            )
        self.choice = choice

    def __enter__(self) -> emulation:
        if torch.compiler.is_compiling():
            raise RuntimeError("octavo.emulation goes around the call of a compiled function, not into it")
        thread = threading.get_ident()
        _ENTERED[thread] = (*_ENTERED.get(thread, ()), self.choice)
        return self

    def __exit__(self, *error: Any) -> None:
        thread = threading.get_ident()
        *outer, _ = _ENTERED.pop(thread)
        if outer:
            _ENTERED[thread] = tuple(outer)


def current_emulation() -> Literal["fp32", "hopper"]:
    """What is in force in this thread: "auto" is "fp32"."""
    if not _ENTERED:
        return "fp32"
    own = _ENTERED.get(threading.get_ident())
    choices = {_meant(own)} if own else _of_callers()
    if len(choices) > 1:
        raise RuntimeError(
            "two threads are inside of octavo.emulation contexts that differ, and this product belongs to a backward"
            " that torch runs in a thread of its own: which one called it is not known; let one end before the other"
            " begins"
        )
    return "hopper" if "hopper" in choices else "fp32"


def _meant(entered: tuple[str, ...]) -> str:
    return "hopper" if entered[-1] == "hopper" else "fp32"


def _of_callers() -> set[str]:
    """The choices of all threads if this one is torch's, which Python has not started; none if it is the user's own."""
    foreign = isinstance(threading.current_thread(), threading._DummyThread)
    return {_meant(entered) for entered in tuple(_ENTERED.values())} if foreign else set()
