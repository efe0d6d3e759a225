"""What Triton makes of the kernels for Hopper and Blackwell, without a device: the instructions the bits rest on."""

from __future__ import annotations

import re
from typing import Any

import pytest

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from octavo.formats import E4M3, E5M2, Format  # noqa: E402
from octavo.kernels.amax.triton_kernel import amax_kernel  # noqa: E402
from octavo.kernels.cast_transpose.triton_kernel import cast_transpose_kernel  # noqa: E402
from octavo.kernels.scale_from_amax.triton_kernel import scale_from_amax_kernel  # noqa: E402

pytestmark = pytest.mark.skipif(
    not hasattr(cast_transpose_kernel, "cache_key"), reason="kernels are interpreted in this process"
)

CONVERSION = {E4M3: "cvt.rn.satfinite.e4m3x2.f32", E5M2: "cvt.rn.satfinite.e5m2x2.f32"}
CODE = {E4M3: (tl.float8e4nv, "*fp8e4nv"), E5M2: (tl.float8e5, "*fp8e5")}
HOPPER, BLACKWELL = 90, 100


def ptx_of(kernel: Any, types: dict[str, str], constants: dict[str, Any], aligned: list[str], capability: int) -> str:
    """PTX of `kernel`, whose arguments have `types` or are `constants`; `aligned` are multiples of 16."""
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else types[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
    return str(compiled.asm["ptx"])


def cast_transpose_ptx(
    dtype: str = "bf16", format: Format = E4M3, capability: int = HOPPER, **constants: bool | int
) -> str:
    code, code_pointer = CODE[format]
    types = dict.fromkeys(("multiplier", "multiplier_t", "amax"), "*fp32")
    types |= dict.fromkeys(("rows", "columns", "stride_row"), "i32")
    types |= {"x": f"*{dtype}", "codes": code_pointer, "codes_t": code_pointer}
    flags = {
        "stride_column": 1, "HAS_CODES": True, "HAS_CODES_T": True, "SHARED": True, "BY_ROW": False,
        "BY_COLUMN": False, "INF_TO_NAN": False, "EVEN": True, "FORMAT_MAX": format.max, "NAN_CODE": format.nan_code,
        "CODE": code, "ALIGNMENT": 16, "BLOCK_ROWS": 128, "BLOCK_COLUMNS": 128,
    }  # fmt: skip
    return ptx_of(cast_transpose_kernel, types, flags | constants, list(types), capability)


def amax_ptx(dtype: str, capability: int = HOPPER) -> str:
    types = {"x": f"*{dtype}", "out": "*fp32", "kept": "i32", "reduced": "i32", "stride_kept": "i32"}
    flags = {"stride_reduced": 1, "KEEP": True, "ATOMIC": True, "BLOCK_KEPT": 8, "BLOCK_REDUCED": 1024}
    return ptx_of(amax_kernel, types, flags, list(types), capability)


def scale_from_amax_ptx(capability: int = HOPPER) -> str:
    types = dict.fromkeys(("amax", "multiplier", "scale"), "*fp32") | {"count": "i32", "epsilon": "fp32"}
    flags = {"FORMAT_MAX": E4M3.max, "SMALLEST": 2.0**-126, "LARGEST": 2.0**126, "POWER_OF_TWO": True, "BLOCK": 256}
    return ptx_of(scale_from_amax_kernel, types, flags, ["amax", "multiplier", "scale"], capability)


@pytest.mark.parametrize("capability", [HOPPER, BLACKWELL])
@pytest.mark.parametrize("format", [E4M3, E5M2], ids=repr)
@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp16"])
def test_a_cast_is_one_multiplication_one_clamp_and_one_rounding_to_nearest(
    dtype: str, format: Format, capability: int
) -> None:
    ptx = cast_transpose_ptx(dtype, format, capability)
    assert CONVERSION[format] in ptx
    assert re.search(r"\bmul(\.rn)?\.f32", ptx) or re.search(r"\bmul(\.rn)?\.f32x2", ptx)
    assert re.search(r"\bmin\.xorsign\.abs\.f32|\bmin\.f32", ptx)
    # Nothing flushes subnormals, fuses the product with a sum, or goes through half precision.
    assert ".ftz" not in ptx
    assert "fma" not in ptx
    assert not re.search(r"cvt\.\w+(\.\w+)?\.f16(x2)?\.f32", ptx)


@pytest.mark.parametrize("capability", [HOPPER, BLACKWELL])
def test_both_divisions_of_a_scale_round_to_nearest(capability: int) -> None:
    ptx = scale_from_amax_ptx(capability)
    assert len(re.findall(r"div\.rn\.f32", ptx)) >= 2
    assert not re.search(r"div\.(full|approx)|rcp\.approx", ptx)
    assert ".ftz" not in ptx


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_amax_compares_integers_and_flushes_nothing(dtype: str) -> None:
    ptx = amax_ptx(dtype)
    assert re.search(r"\bmax\.[su]32", ptx)
    assert not re.search(r"\bmax\.\w*\.?f32", ptx)
    assert ".ftz" not in ptx


def test_a_layout_that_nobody_wants_costs_no_store_and_no_shared_memory() -> None:
    both, one = cast_transpose_ptx(), cast_transpose_ptx(HAS_CODES_T=False)
    assert len(re.findall(r"st\.global\.v4", both)) == 2 * len(re.findall(r"st\.global\.v4", one)) > 0
    assert "ldmatrix" in both
    assert "ldmatrix" not in one


def test_aligned_blocks_are_read_and_written_sixteen_bytes_at_a_time() -> None:
    ptx = cast_transpose_ptx()
    # 128 x 128 elements of two bytes among 256 threads: eight loads; codes in two layouts: four stores each.
    assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) == 8
    assert len(re.findall(r"st\.global\.v4\.b32", ptx)) == 8


@pytest.mark.parametrize("inf_to_nan", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_sixteen_bit_inputs_are_transposed_by_the_load_that_hopper_has_for_it(dtype: str, inf_to_nan: bool) -> None:
    ptx = cast_transpose_ptx(dtype, INF_TO_NAN=inf_to_nan)
    before_the_rare_pass = ptx.partition("st.global.b8")[0]
    assert "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16" in before_the_rare_pass
    assert "ld.shared.b8" not in before_the_rare_pass
