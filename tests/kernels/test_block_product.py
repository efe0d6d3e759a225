"""Octavo's own product under scales by block: what is compiled for Hopper, when it is taken, and on a GPU its bits."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


FORMS = pytest.mark.parametrize("form", [own.WIDE, own.AHEAD], ids=["wide", "ahead"])


def compiled_for_hopper(form: own.Form, dtype: torch.dtype) -> Any:
    tiles, arguments, constants = own.prepare(*operands(400, 512, 272), torch.empty(400, 272, dtype=dtype), form)
    assert tiles == {own.WIDE: 3 * 3, own.AHEAD: 4 * 3}[form]
    return compiled_gluon(own.block_product_kernel, Launch(tiles, None, arguments, (), constants, 4))


@FORMS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_groups_multiply_on_fp8_units_and_all_stays_in_registers(
    form: own.Form, dtype: torch.dtype, tmp_path: Path
) -> None:
    variant = compiled_for_hopper(form, dtype)
    ptx = variant.asm["ptx"]
    blocks = form.groups * form.ahead
    # A group's 64 rows and 128 columns, 128 of K in four instructions, both operands from shared memory.
    products = re.findall(r"wgmma\.mma_async\S*m64n128k32\.f32\.e4m3\.e4m3 \{[^}]*\}, (\{)?", ptx)
    assert products == [""] * (blocks * 4)
    # Of each of a thread's 64 sums: times scale_a, then the fused multiply-add by scale_b.
    assert len(re.findall(r"fma\.rn\.f32", ptx)) == blocks * 64
    assert len(re.findall(r"mul\.(?:rn\.)?f32", ptx)) == blocks * 64
    # Operands in tiles, one of a for each group and one of b; scales as rows of numbers.
    assert len(re.findall(r"cp\.async\.bulk\.tensor\.2d\.shared", ptx)) == form.groups + 1
    assert len(re.findall(r"cp\.async\.bulk\.tensor\.1d\.shared", ptx)) == 2
    # What a multiprocessor of Hopper has.
    assert variant.metadata.shared <= 227 * 1024
    assert stack_and_local_bytes(variant, tmp_path) == [0, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_a_product_is_under_way_while_sums_are_scaled(dtype: torch.dtype) -> None:
    ptx = compiled_for_hopper(own.AHEAD, dtype).asm["ptx"]
    waits = re.findall(r"wgmma\.wait_group\.sync\.aligned (\d)", ptx)
    # Of each block one wait for its sums, and one that additions are not moved across.
    ahead = own.AHEAD.ahead
    assert waits == (["1", "1"] * (ahead - 1) + ["0", "0"]) * own.AHEAD.groups


@pytest.mark.parametrize(
    ("rows", "columns", "alone", "beside"),
    [
        (3072, 768, own.WIDE, own.WIDE),  # 144 tiles of 128 x 128: one wave and a twelfth; 96 of 192 x 128
        (768, 3072, own.WIDE, own.WIDE),
        (2048, 1280, own.WIDE, own.WIDE),  # 160; 110
        (1280, 1280, None, own.AHEAD),  # 100: one wave of either
        (16, 16, None, own.AHEAD),
        (1024, 4096, None, own.AHEAD),  # 256, and 192 of 192 x 128: two waves both
        (5120, 1280, None, own.WIDE),
        (4096, 4096, None, own.WIDE),
        (14336, 4096, own.WIDE, own.WIDE),
        (8192, 8192, own.WIDE, own.WIDE),
    ],
)
def test_the_form_is_the_one_whose_tiles_fill_the_card_in_least_time(
    rows: int, columns: int, alone: own.Form | None, beside: own.Form | None
) -> None:
    assert own.preferred_form(rows, columns, H200) is alone
    assert own.preferred_form(rows, columns, H200, beside=True) is beside


@pytest.fixture
def on_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise, "multiprocessors", lambda x: H200)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def test_short_sums_other_blocks_and_another_triton_leave_the_product_to_the_library(
    on_an_h200: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = (torch.zeros(rows, 2048, dtype=torch.uint8).view(E4M3.dtype) for rows in (3072, 768))
    of_a, of_b, square = torch.ones(16, 3072), torch.ones(16, 768), torch.ones(6, 16)
    takes = functools.partial(blockwise._own_form, out_dtype=torch.bfloat16)
    assert takes(a, b, of_a, of_b)
    assert not takes(a[:, :1920].contiguous(), b[:, :1920].contiguous(), of_a[:15], of_b[:15])
    assert not takes(a, b, of_a, square)
    own._loaded.add((a.get_device(), torch.bfloat16, own.AHEAD))
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
        assert blockwise._own_form(a, b, of_a, scale, torch.bfloat16) is None


def test_a_graph_takes_what_was_loaded_before_and_eager_code_loads_what_a_graph_may_prefer(
    on_an_h200: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = (torch.zeros(1280, 2048, dtype=torch.uint8).view(E4M3.dtype) for _ in range(2))
    of_a, of_b = torch.ones(16, 1280), torch.ones(16, 1280)
    monkeypatch.setattr(own, "_loaded", set())
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(blockwise, "is_beside", lambda: capturing)
    form = functools.partial(blockwise._own_form, a, b, of_a, of_b)
    capturing = True
    assert form(torch.bfloat16) is None
    capturing = False
    assert form(torch.bfloat16) is own.AHEAD
    own._loaded.add((a.get_device(), torch.bfloat16, own.AHEAD))
    assert form(torch.bfloat16) is None
    capturing = True
    assert form(torch.bfloat16) is own.AHEAD
    assert form(torch.float32) is None


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
    monkeypatch.setattr(blockwise, "_own_form", lambda *_: None)
    return blockwise.block_scaled_mm_native


@pytest.mark.gpu
@FORMS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("rule", [ScaleRule(power_of_two=True), ScaleRule()], ids=["powers of two", "any scales"])
@pytest.mark.parametrize(
    ("m", "k", "n"), [(3072, 4096, 768), (192, 128, 128), (208, 1152, 272), (16, 256, 16), (4112, 640, 2000)]
)
def test_its_bits_are_the_librarys(
    m: int, k: int, n: int, rule: ScaleRule, dtype: torch.dtype, form: own.Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, scale_a, scale_b = operands(m, k, n, "cuda", rule)
    if dtype == torch.float16:
        scale_a = scale_a * 2.0**-12  # its range
    found = own.block_product(a, b, scale_a, scale_b, dtype, form)
    assert torch.equal(found, library(monkeypatch)(a, b, scale_a, scale_b, None, dtype))


@pytest.mark.gpu
@FORMS
def test_nan_and_inf_of_an_operand_reach_the_rows_and_columns_that_the_library_gives_them(form: own.Form) -> None:
    a, b, scale_a, scale_b = operands(3072, 2048, 768, "cuda")
    a.view(torch.uint8)[5, 7] = 0x7F  # NaN
    scale_b[3, 9] = float("inf")
    found = own.block_product(a, b, scale_a, scale_b, torch.float32, form)
    with pytest.MonkeyPatch.context() as patched:
        expected = library(patched)(a, b, scale_a, scale_b, None, torch.float32)
    assert found[5].isnan().all()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


@pytest.mark.gpu
@FORMS
def test_many_launches_one_after_the_other_and_in_a_graph_give_the_same_bits(form: own.Form) -> None:
    arguments = operands(3072, 8192, 768, "cuda")
    expected = own.block_product(*arguments, torch.bfloat16, form)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = own.block_product(*arguments, torch.bfloat16, form)
    for _ in range(200):
        graph.replay()
        assert torch.equal(own.block_product(*arguments, torch.bfloat16, form), expected)
    assert torch.equal(captured, expected)


@pytest.mark.gpu
def test_a_weights_gradient_of_such_a_shape_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[own.Form] = []
    product = own.block_product

    def counted(*arguments: Any) -> Tensor:
        taken.append(arguments[-1])
        return product(*arguments)

    monkeypatch.setattr(own, "block_product", counted)
    a, b, scale_a, scale_b = operands(3072, 2048, 768, "cuda")
    found = blockwise.block_scaled_mm(a, b, scale_a, scale_b, None, torch.bfloat16)
    assert taken == [own.preferred_form(3072, 768, torch.cuda.get_device_properties(0).multi_processor_count)]
    reference = blockwise.block_scaled_mm_reference(a, b, scale_a, scale_b, None, torch.bfloat16)
    # In the root mean square 4 x 11 roundings of the tensor core's 13 bits a promotion, and two of bfloat16's, half an
    # ulp at most (`benchmarks/check_blocks.py`).
    bound = math.sqrt(44) * 2.0**-13 + torch.finfo(torch.bfloat16).eps
    assert float((found.float() - reference.float()).norm() / reference.float().norm()) < bound
