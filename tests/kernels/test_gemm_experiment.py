"""The products of `benchmarks/check_gemm.py`, without a device: what Triton makes of them for Hopper, and their values.

Which form stays on wgmma is half of what that experiment asks; the other half, its time, needs the device.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kernels.interpreting import exact_conversions, interpreted
from torch import Tensor

pytest.importorskip("triton")

import triton
from benchmarks import gemm_gluon
from benchmarks.gemm_kernels import FAST, PROMOTED, Blocks, descriptor_kernel, gemm_kernel, gemm_reference
from tests.kernels.variants import Launch, compiled, compiled_gluon, stack_and_local_bytes
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.formats import E4M3, E5M2, Format, cast

BLOCKS = Blocks(128, 128, 128, 8, 3)
WGMMA = r"wgmma\.mma_async\.sync\.aligned\.m64n128k32\.f32\.e5m2\.e4m3"


def codes(rows: int, columns: int, format: Format = E4M3) -> Tensor:
    return cast(torch.randn(rows, columns), format)


def launch(a: Tensor, b: Tensor, imprecise: int | None, wide: bool = False, blocks: Blocks = BLOCKS) -> Launch:
    """Of `gemm_kernel`, into new memory [M, N] in bf16."""
    out = torch.full((a.shape[0], b.shape[1]), float("nan"), dtype=torch.bfloat16)
    numbers = (a.shape[0], b.shape[1], a.shape[1], *a.stride(), *b.stride(), *out.stride())
    programs = triton.cdiv(a.shape[0], blocks.m) * triton.cdiv(b.shape[1], blocks.n)
    tensors = (a, b, out, torch.tensor(0.5), torch.tensor(0.25))
    return Launch(programs, None, tensors, numbers, (*blocks[:3], imprecise, wide), blocks.warps)


def ptx_of(a: Tensor, b: Tensor, imprecise: int | None = FAST) -> str:
    ptx: str = compiled(gemm_kernel, launch(a, b, imprecise)).asm["ptx"]
    return ptx


@pytest.mark.parametrize("imprecise", [FAST, PROMOTED], ids=["fast", "promoted"])
def test_k_major_operands_meet_in_wgmma_straight_from_shared_memory(imprecise: int | None) -> None:
    ptx = ptx_of(codes(256, 256, E5M2), codes(256, 256).t(), imprecise)
    assert re.search(WGMMA, ptx)
    assert "mma.sync" not in ptx
    assert "st.shared.b8" not in ptx
    # Promotion is an addition in float32 for each of a thread's 64 sums.
    assert len(re.findall(r"add\.(rn\.)?f32", ptx)) == (64 if imprecise == PROMOTED else 0)


def test_no_imprecise_product_at_all_leaves_wgmma() -> None:
    ptx = ptx_of(codes(256, 256, E5M2), codes(256, 256).t(), 0)
    assert "wgmma" not in ptx
    assert "mma.sync" in ptx


def test_triton_turns_an_operand_round_byte_by_byte_and_stays_on_wgmma() -> None:
    dy, w, x = codes(256, 256, E5M2), codes(256, 256), codes(256, 256)
    for ptx, operands in ((ptx_of(dy, w), 1), (ptx_of(dy.t(), x), 2)):
        assert re.search(WGMMA, ptx)
        assert "mma.sync" not in ptx
        # 128 x 128 bytes of each such operand among 256 threads.
        assert ptx.count("st.shared.b8") == operands * 64


@pytest.mark.parametrize("specialize", [False, True])
def test_descriptors_bring_tiles_by_tma_and_warps_may_specialize(specialize: bool) -> None:
    a, b, out = codes(256, 256, E5M2), codes(256, 256), torch.empty(256, 256, dtype=torch.bfloat16)
    tiles = [TensorDescriptor.from_tensor(matrix, [128, 128]) for matrix in (a, b, out)]
    tensors = (*tiles[:2], out if specialize else tiles[2], torch.tensor(1.0), torch.tensor(1.0))
    constants = (128, 128, 128, FAST, False, specialize)
    call = Launch(4, None, tensors, (256, 256, 256), constants, 4 if specialize else 8)  # type: ignore[arg-type]
    ptx = compiled(descriptor_kernel, call).asm["ptx"]
    assert re.search(WGMMA, ptx)
    assert "cp.async.bulk.tensor.2d" in ptx
    assert ("setmaxnreg" in ptx) == specialize


def gluon_variant(a: Tensor, b: Tensor, out: Tensor, block_n: int, stages: int, promote: bool) -> Any:
    """What Gluon compiles for a launch of `gluon_gemm`."""
    one, kernel = torch.tensor(1.0), gemm_gluon.gluon_kernel
    tiles, arguments, constants = gemm_gluon.prepare(a, b, one, one, out, block_n, stages, promote)
    return compiled_gluon(kernel, Launch(tiles, None, arguments, (), constants, 4))


@pytest.mark.parametrize("promote", [False, True], ids=["fast", "promoted"])
def test_gluon_brings_a_transposed_operand_to_wgmma_through_registers(promote: bool, tmp_path: Path) -> None:
    w, dy, out = codes(512, 256), codes(384, 512, E5M2), torch.empty(384, 256, dtype=torch.bfloat16)
    variant = gluon_variant(w.t(), dy, out.t(), 128, 4, promote)
    ptx = variant.asm["ptx"]
    # In each of two warp groups: 64 x 128 words of two codes, four registers of two words a load, one permutation for
    # four codes; and 64 rows of either parity, 32 of K at a time, the first operand in four registers.
    loads = 2 * 64 * 128 // (32 * 4 * 4 * 2)
    assert ptx.count("ldmatrix.sync.aligned.m8n8.x4.trans") == loads
    assert len(re.findall(r"prmt\.b32 .*0x(6420|7531)", ptx)) == loads * 2
    products = re.findall(r"wgmma\.mma_async\S*e4m3\.e5m2 \{[^}]*\}, (\{)?", ptx)
    assert products == ["{"] * (2 * 2 * 4)
    assert "st.shared.b8" not in ptx
    assert stack_and_local_bytes(variant, tmp_path) == [0, 0]


@pytest.mark.parametrize(("block_n", "stages", "promote"), [(256, 4, False), (128, 6, True)])
def test_gluon_takes_k_major_operands_from_shared_memory(
    block_n: int, stages: int, promote: bool, tmp_path: Path
) -> None:
    x, w, out = codes(384, 512), codes(256, 512), torch.empty(384, 256, dtype=torch.bfloat16)
    variant = gluon_variant(x, w, out, block_n, stages, promote)
    ptx = variant.asm["ptx"]
    products = re.findall(rf"wgmma\.mma_async\S*m64n{block_n}k32\S*e4m3\.e4m3 \{{[^}}]*\}}, (\{{)?", ptx)
    assert products == [""] * (2 * 4)
    assert "ldmatrix" not in ptx
    assert stack_and_local_bytes(variant, tmp_path) == [0, 0]


def test_two_permutations_part_the_codes_of_two_rows() -> None:
    """PART, as the instruction's manual defines it, on the words that `ldmatrix.trans` would bring of a_t [4, 2]."""
    a_t = torch.arange(8, dtype=torch.uint8).view(4, 2)
    sources = {"$2": a_t[:2].flatten().tolist(), "$3": a_t[2:].flatten().tolist()}
    found = {}
    for target, low, high, selector in re.findall(r"prmt\.b32 (\S+), (\S+), (\S+), 0x(\w+);", gemm_gluon.PART.value):
        pool = sources[low] + sources[high]
        found[target] = [pool[int(digit)] for digit in reversed(selector)]
    assert found == {"$0": a_t[:, 0].tolist(), "$1": a_t[:, 1].tolist()}


def test_a_result_too_large_to_count_in_32_bits_is_refused() -> None:
    a, out = codes(64, 64), torch.empty(2**16, 2**15, dtype=torch.bfloat16, device="meta")
    with pytest.raises(ValueError, match="2147483648 elements"):
        gemm_gluon.prepare(a, a, torch.tensor(1.0), torch.tensor(1.0), out, 128, 4, False)


@interpreted
@pytest.mark.parametrize("order", ["fprop", "dgrad", "wgrad"])
def test_every_memory_order_gives_the_product(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16, which holds every code exactly: the interpreter multiplies no FP8."""
    exact_conversions(monkeypatch)
    a = cast(torch.randn(40, 32), E5M2).to(torch.bfloat16)
    b = cast(torch.randn(32, 24), E4M3).to(torch.bfloat16)
    if order == "wgrad":
        a = a.t().contiguous().t()
    if order == "fprop":
        b = b.t().contiguous().t()
    call = launch(a, b, FAST, True, Blocks(16, 16, 16, 4, 1))
    gemm_kernel[(call.programs,)](*call.arguments, num_warps=4)
    exact = gemm_reference(a, b, call.tensors[3], call.tensors[4])
    # 32 products are added in float32, then the result is rounded to bf16: half an ulp.
    bound = exact.abs() * 2.0**-8 + (a.double().abs() @ b.double().abs()) * 0.125 * 32 * 2.0**-24
    assert ((call.tensors[2].double() - exact).abs() <= bound).all()
