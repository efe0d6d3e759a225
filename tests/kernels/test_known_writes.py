"""What Octavo's kernels write to is asked once a variant, and answered as torch would have answered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton", reason="kernels are Triton's")

import torch._higher_order_ops.triton_kernel_wrap as wrap
import triton
from triton.backends.compiler import GPUTarget

from octavo.formats import E4M3
from octavo.kernels import known_writes
from octavo.kernels.cast_transpose.launch import cast_transpose_kernel, prepare
from octavo.scaling import BLOCK_1X128


class Wrapped:
    """As torch wraps a kernel, here "ours"."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.fn, self.configs = "ours", [triton.Config(arguments, num_warps=4)]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A question that counts how often it is put; about the kernel "ours" the answer may be remembered."""
    calls: list[Any] = []

    def ask(kernel: Any, arguments: Any, descriptors: Any) -> list[str]:
        calls.append(arguments)
        return ["out"]

    monkeypatch.setattr(known_writes, "_REMEMBERED", {"ours"})
    remembering = known_writes.remembering(ask)
    return remembering, calls


def test_the_same_variant_is_asked_about_once(asked: Any) -> None:
    remembering, calls = asked
    for rows in (3, 5):
        answer = remembering("ours", {"x": torch.ones(rows), "n": 3, "flag": True, "kind": None}, {})
        assert answer == ["out"]
        answer.append("spoilt")
    assert len(calls) == 1


def test_what_torch_wraps_around_a_kernel_hides_it_from_nobody(asked: Any) -> None:
    """A wrapper of its own for each launch that says how many warps run it; one with arguments in it is another one."""
    remembering, calls = asked
    for _ in range(3):
        remembering(Wrapped({}), {"n": 1}, {})
    assert len(calls) == 1
    for _ in range(2):
        remembering(Wrapped({"BLOCK": 16}), {"n": 1}, {})
    assert len(calls) == 3


@pytest.mark.parametrize(
    "changed", [{"x": torch.ones(3, dtype=torch.bfloat16)}, {"n": 4}, {"n": 3.0}, {"flag": 1}, {"kind": 0}, {"x": 1}]
)
def test_what_may_decide_is_asked_anew(asked: Any, changed: dict[str, Any]) -> None:
    remembering, calls = asked
    arguments = {"x": torch.ones(3), "n": 3, "flag": True, "kind": None}
    remembering("ours", arguments, {})
    remembering("ours", arguments | changed, {})
    assert len(calls) == 2


def test_kernels_of_others_and_descriptors_are_always_asked_about(asked: Any) -> None:
    remembering, calls = asked
    for _ in range(2):
        remembering("theirs", {"n": 1}, {})
        remembering("ours", {"n": 1}, {"x": "a descriptor"})
    assert len(calls) == 4


def test_the_answer_is_that_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without a GPU, for a stand-in of the driver that is asked which one there is."""

    class Driver:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    previous = triton.runtime.driver._active
    triton.runtime.driver.set_active(Driver())
    try:
        (question,) = [getattr(wrap, name) for name in known_writes._ASKED if hasattr(wrap, name)]
        original = getattr(question, "__wrapped__", question)
        monkeypatch.setattr(known_writes, "_REMEMBERED", {cast_transpose_kernel})
        remembering = known_writes.remembering(original)
        with FakeTensorMode():
            x, scale, gathered = torch.empty(64, 32, dtype=torch.bfloat16), torch.empty(()), torch.empty(())
            for columnwise in (scale, None):
                call = prepare(x, E4M3, scale, columnwise, None, gathered, False, False)
                arguments = (*call.tensors, *call.numbers, *call.constants)
                named = dict(zip(cast_transpose_kernel.arg_names, arguments, strict=True))
                answers = [str(one(cast_transpose_kernel, dict(named), {})) for one in (original, *[remembering] * 2)]
                assert answers[0] == answers[1] == answers[2]
                assert ("'codes_t'" in answers[0]) == (columnwise is not None), "else nothing would have been told"
    finally:
        triton.runtime.driver._active = previous
    assert len(remembering.answers) == 2


@pytest.mark.parametrize("kernel", ["cast_transpose", "block_cast", "block_cast of words"])
def test_a_traced_graph_asks_once_a_variant(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    """Whatever torch hands over while it traces: four casts of one variant, each traced several times."""
    from tests.kernels.traced_launches import Compiled, take_kernels_everywhere

    from octavo.kernels import ScaleRule, cast_transpose
    from octavo.kernels.block_cast import block_cast

    take_kernels_everywhere(monkeypatch)
    (name,) = (name for name in known_writes._ASKED if hasattr(wrap, name))
    question, calls = getattr(wrap, name).__wrapped__, []

    def ask(kernel: Any, arguments: Any, descriptors: Any) -> Any:
        calls.append(kernel)
        return question(kernel, arguments, descriptors)

    monkeypatch.setattr(wrap, name, known_writes.remembering(ask))

    def cast(x: torch.Tensor, scale: torch.Tensor) -> Any:
        if kernel == "cast_transpose":
            return cast_transpose(x, E4M3, scale, None)
        return block_cast(x, E4M3, BLOCK_1X128, ScaleRule(), columnwise=False)

    def four(x: torch.Tensor, scale: torch.Tensor) -> list[torch.Tensor]:
        return [cast(x + number, scale).codes.float() for number in range(4)]

    x = torch.randn(48, 96, dtype=torch.bfloat16 if kernel == "block_cast of words" else torch.float32)
    torch._dynamo.reset()
    torch.compile(four, backend=Compiled(), fullgraph=True)(x, torch.tensor(0.5))
    assert len(calls) == 1
