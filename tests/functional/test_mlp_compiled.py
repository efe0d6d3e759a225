"""MLPs as one in compiled code with the Triton kernels in its graphs: the bits of eager code, each thing once."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="kernels are Triton's")

from tests.functional.test_mlp import RECIPES, Parts, assert_equal, pair, run
from tests.kernels import traced_launches
from tests.kernels.traced_launches import Compiled, take_kernels_everywhere

import octavo
from octavo.formats import E4M3, E5M2
from octavo.kernels.activation_backward_cast import (
    activation_backward_cast_reference,
    activation_backward_output_reference,
)
from octavo.kernels.activation_cast import activation_cast_reference, activation_output_reference
from octavo.kernels.gated_backward_cast import gated_backward_cast_reference, gated_backward_output_reference
from octavo.kernels.gated_cast import gated_cast_reference, gated_output_reference

# Of multiples of 16 nothing is cut off.
TOKENS, SIZES = 32, (48, 64, 32)
# What a launch rounds through is none of the arguments that the harness sees.
THROUGH = torch.bfloat16


def _format(codes: Tensor) -> Any:
    return E4M3 if codes.dtype == E4M3.dtype else E5M2


def run_gated_cast(**of: Any) -> None:
    outputs = gated_cast_reference(
        of["gate"], of["up"], of["BASE"], _format(of["codes" if of["HAS_CODES"] else "codes_t"]), of["scale"],
        THROUGH, of["gathered"] if of["GATHER"] else None, of["HAS_CODES"], of["HAS_CODES_T"],
    )  # fmt: skip
    for name, made in zip(("codes", "scale_used", "codes_t"), outputs, strict=True):
        if made is not None:
            of[name].copy_(made.reshape(of[name].shape))


def run_gated_backward_cast(**of: Any) -> None:
    gathered = tuple(of[f"gathered_{one}"] if of[f"GATHER_{one.upper()}"] else None for one in ("gate", "up"))
    wanted = of["SUM_GATE"], of["SUM_UP"]
    outputs = gated_backward_cast_reference(
        of["grad"], of["gate"], of["up"], of["BASE"], _format(of["codes_gate"]), (of["scale_gate"], of["scale_up"]),
        THROUGH, gathered, of["INF_TO_NAN"], wanted,
    )  # fmt: skip
    for one, (codes, scale, codes_t, sums) in zip(("gate", "up"), outputs, strict=True):
        of[f"codes_{one}"].copy_(codes)
        of[f"used_{one}"].copy_(scale.reshape(1))
        of[f"codes_t_{one}"].copy_(codes_t)
        if sums is not None:
            # The first part is all of it.
            of[f"sums_{one}"].zero_()[0] = sums


def run_gated_output(**of: Any) -> None:
    output, amax = gated_output_reference(of["gate"], of["up"], of["BASE"], of["output"].dtype)
    of["output"].copy_(output)
    of["amaxes"].fill_(amax[0])


def run_gated_backward_output(**of: Any) -> None:
    pairs = gated_backward_output_reference(of["grad"], of["gate"], of["up"], of["BASE"], of["dgate"].dtype)
    for one, (output, amax) in zip(("gate", "up"), pairs, strict=True):
        of[f"d{one}"].copy_(output)
        of[f"amaxes_{one}"].fill_(amax[0])


def run_activation_cast(**of: Any) -> None:
    outputs = activation_cast_reference(
        of["x"], of["BASE"], _format(of["codes" if of["HAS_CODES"] else "codes_t"]), of["scale"], THROUGH,
        of["gathered"] if of["GATHER"] else None, of["HAS_CODES"], of["HAS_CODES_T"],
    )  # fmt: skip
    for name, made in zip(("codes", "scale_used", "codes_t"), outputs, strict=True):
        if made is not None:
            of[name].copy_(made.reshape(of[name].shape))


def run_activation_backward_cast(**of: Any) -> None:
    codes, scale, codes_t, sums = activation_backward_cast_reference(
        of["grad"], of["x"], of["BASE"], _format(of["codes"]), of["scale"], THROUGH,
        of["gathered"] if of["GATHER"] else None, of["INF_TO_NAN"], of["COLUMN_SUM"],
    )  # fmt: skip
    for name, made in (("codes", codes), ("scale_used", scale.reshape(1)), ("codes_t", codes_t)):
        of[name].copy_(made)
    if sums is not None:
        # The first part is all of it.
        of["sums"].zero_()[0] = sums


def run_activation_output(**of: Any) -> None:
    output, amax = activation_output_reference(of["x"], of["BASE"], of["output"].dtype)
    of["output"].copy_(output)
    of["amaxes"].fill_(amax[0])


def run_activation_backward_output(**of: Any) -> None:
    output, amax = activation_backward_output_reference(of["grad"], of["x"], of["BASE"], of["output"].dtype)
    of["output"].copy_(output)
    of["amaxes"].fill_(amax[0])


RUN = {
    "activation_cast_kernel": run_activation_cast,
    "activation_backward_cast_kernel": run_activation_backward_cast,
    "activation_output_kernel": run_activation_output,
    "activation_backward_output_kernel": run_activation_backward_output,
    "gated_cast_kernel": run_gated_cast,
    "gated_backward_cast_kernel": run_gated_backward_cast,
    "gated_output_kernel": run_gated_output,
    "gated_backward_output_kernel": run_gated_backward_output,
}


@pytest.fixture(autouse=True)
def kernels_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    take_kernels_everywhere(monkeypatch)
    for name in ("gated_cast", "gated_backward_cast", "activation_cast", "activation_backward_cast"):
        monkeypatch.setattr(importlib.import_module(f"octavo.kernels.{name}"), "runs_inductor", lambda *_: True)
    for name, run_kernel in RUN.items():
        monkeypatch.setitem(traced_launches._RUN, name, run_kernel)


def compiled_pair(name: str, gated: bool, backend: Compiled) -> tuple[Parts, Parts]:
    one, other = pair(RECIPES[name], gated, sizes=SIZES)
    one.compiled = torch.compile(one.as_one, fullgraph=True, backend=backend)  # type: ignore[assignment]
    return one, other


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize(
    "name", ["delayed", "current", "delayed, input kept", "current, input kept", "delayed, all kept"]
)
def test_steps_give_the_bits_of_eager_code(name: str, gated: bool) -> None:
    backend = Compiled()
    one, other = compiled_pair(name, gated, backend)
    for number in range(4):
        x = torch.randn(TOKENS, SIZES[0], requires_grad=True)
        # Of integers, so that sums of them do not depend on their order.
        dy = torch.randint(-4, 5, (TOKENS, SIZES[2])).float() * 2.0**number
        with torch.autocast("cpu", torch.bfloat16):
            found, expected = run(one, "compiled", x, dy), run(other, "as_one", x, dy)
        names = ["y", "x", *(name for name, _ in one.named_parameters())]
        for place, a, b in zip(names, found, expected, strict=True):
            if place.endswith("bias"):
                # Sums are added in another order: some roundings of float32.
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)
            else:
                assert torch.equal(a, b), place
        for parts in (one, other):
            octavo.update_scales(parts)
    assert_equal(list(one.state_dict().values()), list(other.state_dict().values()))
    assert backend.clones == 0, "a launch writes where it is to write"
    # Codes of the weights, of x and a, unless these are made again.
    width, hidden, out = SIZES
    codes = 0 if name.endswith("all kept") else (2 if gated else 1) * hidden * width + hidden * out
    codes += 0 if name.endswith("kept") else TOKENS * (width + hidden)
    assert backend.kept_codes == backend.graphs * codes


def test_what_is_launched_in_a_step_whose_scales_are_known() -> None:
    backend = Compiled()
    one, _ = compiled_pair("delayed", True, backend)
    with torch.autocast("cpu", torch.bfloat16):
        run(one, "compiled", torch.randn(TOKENS, SIZES[0], requires_grad=True), torch.randn(TOKENS, SIZES[2]))
    known = backend.launches
    assert known["gated_cast_kernel"] == known["gated_backward_cast_kernel"] == 1
    # x once for both, three weights, dy.
    assert known["cast_transpose_kernel"] == 5
    assert not {"gated_output", "gated_backward_output"} & set(known)


def test_gate_may_be_frozen_where_codes_are_made_again() -> None:
    one, other = compiled_pair("current, input kept", True, Compiled())
    for parts in (one, other):
        parts.first["gate"].requires_grad_(False)
    x, dy = torch.randn(TOKENS, SIZES[0], requires_grad=True), torch.randint(-4, 5, (TOKENS, SIZES[2])).float()
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = run(one, "compiled", x, dy), run(other, "as_one", x, dy)
    assert torch.equal(found[1], expected[1])
    assert torch.equal(one.first["up"].weight.grad, other.first["up"].weight.grad)
    assert one.first["gate"].weight.grad is None


def test_what_is_launched_where_codes_are_made_again() -> None:
    backend = Compiled()
    one, _ = compiled_pair("delayed, all kept", True, backend)
    with torch.autocast("cpu", torch.bfloat16):
        run(one, "compiled", torch.randn(TOKENS, SIZES[0], requires_grad=True), torch.randn(TOKENS, SIZES[2]))
    assert backend.launches["gated_cast_kernel"] == 2
    # x and three weights twice, dy.
    assert backend.launches["cast_transpose_kernel"] == 9
