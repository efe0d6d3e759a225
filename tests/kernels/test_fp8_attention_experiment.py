"""benchmarks/attention_ahead.py without a device: its numbers under the interpreter, what Triton makes of its loop."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from benchmarks import attention_ahead
from tests.kernels.interpreting import exact_conversions, interpreted, silent
from tests.kernels.test_fp8_attention import assert_agrees, operands, score_rounding
from tests.kernels.test_fp8_attention_offline import codes
from tests.kernels.variants import compiled, launches_of

from octavo.kernels.fp8_attention import fp8_attention_reference, triton_kernel


@interpreted
@silent
@pytest.mark.parametrize(
    ("num_queries", "num_keys", "causal"),
    [(1, 1, False), (2, 128, True), (130, 257, True), (140, 20, True), (20, 400, False), (20, 384, False)],
)
def test_products_ahead_give_the_numbers_of_the_reference(
    monkeypatch: pytest.MonkeyPatch, num_queries: int, num_keys: int, causal: bool
) -> None:
    exact_conversions(monkeypatch)
    inputs = operands(num_queries, num_keys, 64, groups=1)
    given = fp8_attention_reference(inputs[0], inputs[1], inputs[2], 0.125, causal)[2]
    out, lse = attention_ahead.attend_ahead(given, (num_queries, num_keys), 0.125, causal, torch.bfloat16)
    assert_agrees((out, lse, given), inputs, causal, score_rounding(given, (num_queries, num_keys)) + 2.0**-20)


def test_products_of_the_next_keys_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        (launch,) = launches_of(
            patched,
            attention_ahead,
            "_launch_ahead",
            lambda: attention_ahead.attend_ahead(codes(512, 64), (512, 512), 0.125, False, torch.bfloat16),
        )
    ptx: Any = compiled(attention_ahead.ahead_kernel, launch).asm["ptx"]
    # In a loop a product is committed, and exponentials come before anything is waited for.
    steps = re.findall(r"wgmma\.(commit|wait)_group|(ex2)\.approx", ptx)
    said = re.sub("(ex2 )+", "ex2 ", " ".join(one or other for one, other in steps))
    assert "commit wait commit ex2" in said
    # In Octavo's own, which is simpler, they are not.
    with monkeypatch.context() as patched:
        (launch,) = launches_of(
            patched,
            triton_kernel,
            "_launch_attention",
            lambda: triton_kernel.attend_triton(codes(512, 64), (512, 512), 0.125, False, torch.bfloat16),
        )
    ptx = compiled(triton_kernel.fp8_attention_kernel, launch).asm["ptx"]
    assert "commit ex2" not in " ".join(
        one or other for one, other in re.findall(r"wgmma\.(commit|wait)_group|(ex2)\.approx", ptx)
    )
