"""Octavo's own product under scales by block: what is compiled for Hopper, when it is taken, and on a GPU its bits."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.variants import Launch, compiled_gluon, stack_and_local_bytes

from octavo.formats import E4M3
from octavo.kernels import ScaleRule
from octavo.kernels.block_cast import block_cast
from octavo.kernels.scaled_mm import block_product as own
from octavo.kernels.scaled_mm import blockwise
from octavo.scaling import BLOCK_1X128

Operands = tuple[Tensor, Tensor, Tensor, Tensor]
H200 = 132  # multiprocessors


def operands(m: int, k: int, n: int, device: str = "cpu", rule: ScaleRule | None = None) -> Operands:
    """(a, b, scale_a, scale_b) of a weight's gradient [M, N] over K tokens, of many magnitudes."""
    casts = []
    for features in (m, n):
        spread = torch.randint(-6, 7, (k, 1), device=device).float().exp2()
        data = torch.randn(k, features, device=device) * spread
        casts.append(block_cast(data, E4M3, BLOCK_1X128, rule or ScaleRule(power_of_two=True), False, True))
    (_, _, a, scale_a, *_), (_, _, b, scale_b, *_) = casts
    assert a is not None
    assert b is not None
    assert scale_a is not None
    assert scale_b is not None
    return a, b, scale_a, scale_b


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_three_groups_multiply_on_fp8_units_and_all_stays_in_registers(dtype: torch.dtype, tmp_path: Path) -> None:
    tiles, arguments, constants = own.prepare(*operands(400, 512, 272), torch.empty(400, 272, dtype=dtype))
    assert tiles == 3 * 3
    variant = compiled_gluon(own.block_product_kernel, Launch(tiles, None, arguments, (), constants, 4))
    ptx = variant.asm["ptx"]
    # A group's 64 rows and 128 columns, 128 of K in four instructions, both operands from shared memory.
    products = re.findall(r"wgmma\.mma_async\S*m64n128k32\.f32\.e4m3\.e4m3 \{[^}]*\}, (\{)?", ptx)
    assert products == [""] * (3 * 4)
    # Of each of a thread's 64 sums: times scale_a, then the fused multiply-add by scale_b.
    assert len(re.findall(r"fma\.rn\.f32", ptx)) == 3 * 64
    assert len(re.findall(r"mul\.(?:rn\.)?f32", ptx)) == 3 * 64
    # Operands in tiles, three of a and one of b; scales as rows of numbers.
    assert len(re.findall(r"cp\.async\.bulk\.tensor\.2d\.shared", ptx)) == 4
    assert len(re.findall(r"cp\.async\.bulk\.tensor\.1d\.shared", ptx)) == 2
    # What a multiprocessor of Hopper has.
    assert variant.metadata.shared <= 227 * 1024
    assert stack_and_local_bytes(variant, tmp_path) == [0, 0]


@pytest.mark.parametrize(
    ("rows", "columns", "faster"),
    [
        (3072, 768, True),  # 144 tiles of 128 x 128: one wave and a twelfth; 96 of 192 x 128
        (768, 3072, True),
        (2048, 1280, True),  # 160; 110
        (2304, 768, False),  # 108: one wave
        (1280, 1280, False),
        (1024, 4096, False),  # 256, and 192 of 192 x 128: two waves both
        (5120, 1280, False),
        (4096, 4096, False),
        (16, 16, False),
    ],
)
def test_it_is_taken_where_tiles_of_128_x_128_leave_much_of_the_card_idle(
    rows: int, columns: int, faster: bool
) -> None:
    assert own.is_faster(rows, columns, H200) is faster


@pytest.fixture
def on_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise, "multiprocessors", lambda x: H200)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def test_short_sums_other_blocks_and_another_triton_leave_the_product_to_the_library(
    on_an_h200: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = (torch.zeros(rows, 2048, dtype=torch.uint8).view(E4M3.dtype) for rows in (3072, 768))
    of_a, of_b, square = torch.ones(16, 3072), torch.ones(16, 768), torch.ones(6, 16)
    takes = functools.partial(blockwise._takes_own_product, out_dtype=torch.bfloat16)
    assert takes(a, b, of_a, of_b)
    assert not takes(a[:, :1920].contiguous(), b[:, :1920].contiguous(), of_a[:15], of_b[:15])
    assert not takes(a, b, of_a, square)
    assert not takes(a[:1280], b, of_a[:, :1280].contiguous(), of_b)
    monkeypatch.setattr(blockwise, "_has_gluon", lambda: False)
    assert not takes(a, b, of_a, of_b)


def test_memory_that_tma_does_not_read_is_left_to_the_library(on_an_h200: None) -> None:
    a, b = (torch.zeros(rows, 2048, dtype=torch.uint8).view(E4M3.dtype) for rows in (3072, 768))
    of_a, of_b = torch.ones(16, 3072), torch.ones(16, 768)
    shifted = torch.ones(16 * 768 + 1)[1:].view(16, 768)
    assert own.takes(a, b, of_a, of_b)
    for scale in (of_b.t().contiguous().t(), shifted):
        assert not own.takes(a, b, of_a, scale)
        assert not blockwise._takes_own_product(a, b, of_a, scale, torch.bfloat16)


def test_a_graph_takes_what_was_loaded_before_and_eager_code_loads_what_a_graph_may_prefer(
    on_an_h200: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = (torch.zeros(rows, 2048, dtype=torch.uint8).view(E4M3.dtype) for rows in (5120, 1280))
    of_a, of_b = torch.ones(16, 5120), torch.ones(16, 1280)
    assert not own.is_faster(5120, 1280, H200)
    assert own.is_faster(5120, 1280, H200, beside=True)
    monkeypatch.setattr(own, "_loaded", set())
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(blockwise, "is_beside", lambda: capturing)
    takes = functools.partial(blockwise._takes_own_product, a, b, of_a, of_b)
    capturing = True
    assert not takes(torch.bfloat16)
    capturing = False
    assert takes(torch.bfloat16)
    own._loaded.add((a.get_device(), torch.bfloat16))
    assert not takes(torch.bfloat16)
    capturing = True
    assert takes(torch.bfloat16)
    assert not takes(torch.float32)


@pytest.mark.parametrize(("rows", "columns"), [(256, 19968), (1024, 3072)])
def test_beside_other_work_it_is_not_taken_where_all_its_tiles_take_longer(rows: int, columns: int) -> None:
    assert not own.is_faster(rows, columns, H200, beside=True)


def test_gluon_is_known_in_one_version_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    found = {}
    for version in ("3.6.0", "3.7.0"):
        monkeypatch.setattr(triton, "__version__", version)
        found[version] = blockwise._has_gluon.__wrapped__()
    assert found == {"3.6.0": True, "3.7.0": False}
    monkeypatch.setattr(blockwise, "triton_is_installed", lambda: False)
    assert not blockwise._has_gluon.__wrapped__()


def library(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    """cuBLASLt's product, whatever the shape."""
    monkeypatch.setattr(blockwise, "_takes_own_product", lambda *_: False)
    return blockwise.block_scaled_mm_native


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("rule", [ScaleRule(power_of_two=True), ScaleRule()], ids=["powers of two", "any scales"])
@pytest.mark.parametrize(
    ("m", "k", "n"), [(3072, 4096, 768), (192, 128, 128), (208, 1152, 272), (16, 256, 16), (4112, 640, 2000)]
)
def test_its_bits_are_the_librarys(
    m: int, k: int, n: int, rule: ScaleRule, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, scale_a, scale_b = operands(m, k, n, "cuda", rule)
    if dtype == torch.float16:
        scale_a = scale_a * 2.0**-12  # its range
    found = own.block_product(a, b, scale_a, scale_b, dtype)
    assert torch.equal(found, library(monkeypatch)(a, b, scale_a, scale_b, None, dtype))


@pytest.mark.gpu
def test_nan_and_inf_of_an_operand_reach_the_rows_and_columns_that_the_library_gives_them() -> None:
    a, b, scale_a, scale_b = operands(3072, 2048, 768, "cuda")
    a.view(torch.uint8)[5, 7] = 0x7F  # NaN
    scale_b[3, 9] = float("inf")
    found = own.block_product(a, b, scale_a, scale_b, torch.float32)
    with pytest.MonkeyPatch.context() as patched:
        expected = library(patched)(a, b, scale_a, scale_b, None, torch.float32)
    assert found[5].isnan().all()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


@pytest.mark.gpu
def test_many_launches_one_after_the_other_and_in_a_graph_give_the_same_bits() -> None:
    arguments = operands(3072, 8192, 768, "cuda")
    expected = own.block_product(*arguments, torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = own.block_product(*arguments, torch.bfloat16)
    for _ in range(200):
        graph.replay()
        assert torch.equal(own.block_product(*arguments, torch.bfloat16), expected)
    assert torch.equal(captured, expected)


@pytest.mark.gpu
def test_a_weights_gradient_of_such_a_shape_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[torch.dtype] = []
    product = own.block_product

    def counted(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype) -> Tensor:
        taken.append(out_dtype)
        return product(a, b, scale_a, scale_b, out_dtype)

    monkeypatch.setattr(own, "block_product", counted)
    a, b, scale_a, scale_b = operands(3072, 2048, 768, "cuda")
    found = blockwise.block_scaled_mm(a, b, scale_a, scale_b, None, torch.bfloat16)
    assert bool(taken) is own.is_faster(3072, 768, torch.cuda.get_device_properties(0).multi_processor_count)
    reference = blockwise.block_scaled_mm_reference(a, b, scale_a, scale_b, None, torch.bfloat16)
    # In the root mean square 4 x 11 roundings of the tensor core's 13 bits a promotion, and two of bfloat16's, half an
    # ulp at most (`benchmarks/check_blocks.py`).
    bound = math.sqrt(44) * 2.0**-13 + torch.finfo(torch.bfloat16).eps
    assert float((found.float() - reference.float()).norm() / reference.float().norm()) < bound
