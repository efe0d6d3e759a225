"""What Triton makes of fp8_attention, without a device: products on FP8 units, nothing outside of registers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.variants import (
    ADA,
    BLACKWELL,
    Launch,
    compiled,
    launches_of,
    specialized,
    stack_and_local_bytes,
)

from octavo.formats import E4M3
from octavo.kernels.fp8_attention import AttentionCodes, cast_kernel, triton_kernel


def codes(tokens: int, features: int, heads: int = 2) -> AttentionCodes:
    """Of one sequence, what is in them does not matter."""
    blocks = -(-tokens // 128)
    lying = torch.zeros(1, heads, blocks * 128, features, dtype=E4M3.dtype)
    scale = torch.ones(1, heads, blocks)
    return AttentionCodes(lying, scale, lying, scale, lying.mT.contiguous(), scale)


def launch(
    monkeypatch: pytest.MonkeyPatch, tokens: int, features: int, causal: bool, dtype: torch.dtype = torch.bfloat16
) -> Launch:
    with monkeypatch.context() as patched:
        (found,) = launches_of(
            patched,
            triton_kernel,
            "_launch_attention",
            lambda: triton_kernel.attend_triton(codes(tokens, features), (tokens, tokens), 0.1, causal, dtype),
        )
    return found


def cast_launch(monkeypatch: pytest.MonkeyPatch, x: torch.Tensor, by_feature: bool) -> Launch:
    with monkeypatch.context() as patched:
        (found,) = launches_of(
            patched, cast_kernel, "_launch_cast", lambda: cast_kernel.cast_tokens_triton(x, by_feature)
        )
    return found


def products(ptx: str) -> set[str]:
    """The instructions of matrix products."""
    return set(re.findall(r"(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)[.\w:]*", ptx))


@pytest.mark.parametrize(("features", "causal"), [(128, True), (64, False)])
@pytest.mark.parametrize("queries", [64, 128])
def test_both_products_are_on_fp8_units_of_hopper_and_all_stays_in_registers(
    monkeypatch: pytest.MonkeyPatch, features: int, causal: bool, queries: int, tmp_path: Path
) -> None:
    monkeypatch.setattr(triton_kernel, "_QUERIES", queries)
    monkeypatch.setattr(triton_kernel, "_WARPS", queries // 16)
    variant = compiled(triton_kernel.fp8_attention_kernel, launch(monkeypatch, 256, features, causal))
    ptx = variant.asm["ptx"]
    # A warpgroup's 64 queries, 128 keys or all features, 32 to sum over at a time; nothing else multiplies matrices.
    wgmma = "wgmma.mma_async.sync.aligned.m64n{}k32.f32.e4m3.e4m3"
    assert products(ptx) == {wgmma.format(128), wgmma.format(features)}
    # Each loop, with a mask and without, sums D features and 128 keys.
    assert len(re.findall(r"wgmma\.mma_async", ptx)) == 2 * (features // 32 + 128 // 32)
    # Probabilities are cast in pairs: 128 of each query, of which a thread has half.
    assert ptx.count("cvt.rn.satfinite.e4m3x2.f32") == 2 * 32
    assert "ex2.approx" in ptx
    # Keys and values are on their way while others are multiplied.
    assert "cp.async.cg.shared.global" in ptx
    assert stack_and_local_bytes(variant, tmp_path) == [0, 0]


@pytest.mark.parametrize(("capability", "expected"), [(ADA, "m16n8k32.row.col.f32.e4m3.e4m3"), (BLACKWELL, "f8f6f4")])
def test_other_architectures_compile_it_for_their_own_fp8_units(
    monkeypatch: pytest.MonkeyPatch, capability: int, expected: str
) -> None:
    """Not that it runs there: Ada is refused, as Triton rounds to E4M3 by way of half precision (`triton_support`)."""
    variant = compiled(triton_kernel.fp8_attention_kernel, launch(monkeypatch, 256, 64, True), capability)
    assert any(expected in name for name in products(variant.asm["ptx"]))


@pytest.mark.parametrize(("features", "by_feature"), [(64, True), (128, False), (128, True)])
def test_casts_read_and_write_sixteen_bytes_at_a_time(
    monkeypatch: pytest.MonkeyPatch, features: int, by_feature: bool, tmp_path: Path
) -> None:
    x = torch.ones(2, 300, 3, features, dtype=torch.bfloat16).transpose(1, 2)
    variant = compiled(cast_kernel.cast_tokens_kernel, cast_launch(monkeypatch, x, by_feature))
    ptx = variant.asm["ptx"]
    threads = 32 * cast_kernel.WARPS
    assert len(re.findall(r"ld\.global[.\w:]*\.v4\.b32", ptx)) == 128 * features * 2 // (16 * threads)
    assert len(re.findall(r"st\.global[.\w:]*\.v4\.b32", ptx)) == 128 * features // (16 * threads)
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
    assert ".ftz" not in ptx
    assert stack_and_local_bytes(variant, tmp_path) == [0, 0]


@pytest.mark.parametrize(("features", "by_feature"), [(64, False), (128, True)])
def test_codes_become_values_sixteen_bytes_at_a_time(
    monkeypatch: pytest.MonkeyPatch, features: int, by_feature: bool, tmp_path: Path
) -> None:
    given = codes(300, features)
    x = given.vt if by_feature else given.q
    with monkeypatch.context() as patched:
        (found,) = launches_of(
            patched,
            cast_kernel,
            "_launch_decode",
            lambda: cast_kernel.decode_tokens_triton(x, given.q_scale, 300, torch.bfloat16, by_feature),
        )
    variant = compiled(cast_kernel.decode_tokens_kernel, found)
    ptx, threads = variant.asm["ptx"], 32 * cast_kernel.WARPS
    assert len(re.findall(r"ld\.global[.\w:]*\.v4\.b32", ptx)) == 128 * features // (16 * threads)
    assert len(re.findall(r"st\.global[.\w:]*\.v4\.b32", ptx)) == 128 * features * 2 // (16 * threads)
    assert stack_and_local_bytes(variant, tmp_path) == [0, 0]


def test_tokens_and_heads_are_no_constants_of_any_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even 1 and multiples of 16, for which Triton would compile anew without the launcher's key knowing."""
    found: list[Any] = []
    for tokens in (1, 16, 300):
        of_attention = launch(monkeypatch, tokens, 64, True)
        x = torch.ones(1, 2, tokens, 64, dtype=torch.bfloat16)
        of_cast = cast_launch(monkeypatch, x, True)
        kinds = (
            specialized(triton_kernel.fp8_attention_kernel, of_attention),
            specialized(cast_kernel.cast_tokens_kernel, of_cast),
        )
        found.append((kinds[0], of_attention.key))
        names = cast_kernel.cast_tokens_kernel.arg_names
        for name in ("tokens", "heads"):
            assert kinds[1][names.index(name)] == ("i32", None)
    assert found[0] == found[1] == found[2]


def test_what_decides_on_a_variant_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {
        launch(monkeypatch, 128, 64, True).key,
        launch(monkeypatch, 128, 64, False).key,
        launch(monkeypatch, 128, 128, True).key,
        launch(monkeypatch, 128, 64, True, torch.float16).key,
    }
    assert len(keys) == 4
    x = torch.ones(1, 2, 300, 80, dtype=torch.bfloat16)
    casts = [(x[..., :64], False), (x[..., :64], True), (x[..., 1:65], False), (x.half()[..., :64], False)]
    casts += [(torch.ones(1, 2, 300, 65, dtype=torch.bfloat16)[..., :64], False)]
    assert len({cast_launch(monkeypatch, *each).key for each in casts}) == 5
