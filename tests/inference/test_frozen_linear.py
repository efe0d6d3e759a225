"""FrozenLinear: its numbers against an independent computation, its state, and what it refuses."""

from __future__ import annotations

import copy
import io
import math
import pickle
from pathlib import Path

import pytest
import safetensors.torch
import torch
from tests.inference.served_values import expected
from tests.measures import sqnr_db
from torch import Tensor, nn

import octavo
from octavo.formats import E4M3, decode
from octavo.inference import SCHEMES, FrozenLinear
from octavo.inference.scheme import scheme_named

NAMES = [scheme.name for scheme in SCHEMES]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# E4M3 rounds to steps of 2^-3 of a binade's lower end: a noise of at most 2^-6 / 12 of the signal's square, if all
# values lay at that end, where errors are spread evenly. Both operands lose that much, independently.
LEAST_SQNR = -10 * math.log10(2 * 2.0**-6 / 12)
# Amaxes of 256 x 64 or fewer numbers of N(0, 1) stay below 6.
STATIC = 6.0 / E4M3.max


def frozen(scheme: str, weight: Tensor, bias: Tensor | None = None, input_scale: float = STATIC) -> FrozenLinear:
    chosen = scheme_named(scheme)
    return FrozenLinear(weight, bias, chosen, input_scale if chosen.static else None)


def check(layer: FrozenLinear, x: Tensor, dtype: torch.dtype) -> None:
    with torch.no_grad():
        y = layer(x)
    assert y.dtype == dtype
    assert y.shape == (*x.shape[:-1], layer.out_features)
    rows = x.reshape(-1, layer.in_features)
    exact, bound = expected(layer.state_dict(), layer.scheme.name, rows, dtype)
    excess = (y.reshape(exact.shape).double() - exact).abs() - bound
    assert excess.max() <= 0, f"beyond the bound by {excess.max():.3g}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", NAMES)
def test_output_equals_an_independent_computation(scheme: str, dtype: torch.dtype) -> None:
    weight, bias = torch.randn(96, 256), torch.randn(96)
    x = torch.randn(40, 256).to(dtype)
    check(frozen(scheme, weight.to(dtype), bias.to(dtype)), x, dtype)


@pytest.mark.parametrize("shape", [(1, 5, 3), (7, 767, 33), (13, 133, 128), (50, 129, 257)])
@pytest.mark.parametrize("scheme", NAMES)
def test_odd_sizes(scheme: str, shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    check(frozen(scheme, torch.randn(n, k), torch.randn(n)), torch.randn(m, k), torch.float32)
    check(frozen(scheme, torch.randn(n, k)), torch.randn(m, k).bfloat16(), torch.bfloat16)


@pytest.mark.parametrize("scheme", NAMES)
def test_against_high_precision(scheme: str) -> None:
    weight, bias, x = torch.randn(256, 256), torch.randn(256), torch.randn(64, 256)
    y = frozen(scheme, weight, bias)(x)
    exact = nn.functional.linear(x.double(), weight.double(), bias.double())
    assert sqnr_db(exact, y) > LEAST_SQNR


@pytest.mark.parametrize("scheme", NAMES)
def test_leading_dimensions_and_strides(scheme: str) -> None:
    layer = frozen(scheme, torch.randn(48, 64), torch.randn(48))
    x = torch.randn(3, 5, 64)
    y = layer(x)
    check(layer, x, torch.float32)
    if scheme != "tensor_dynamic":  # whose scale is that of all tokens
        assert torch.equal(layer(x[0, 0]), y[0, 0])
    assert torch.equal(layer(x.transpose(0, 1)), y.transpose(0, 1))
    assert torch.equal(layer(torch.randn(2, 3, 64)[:, :0]), torch.empty(2, 0, 48))
    wide = torch.randn(10, 128)
    assert torch.equal(layer(wide[:, ::2]), layer(wide[:, ::2].contiguous()))


@pytest.mark.parametrize("scheme", NAMES)
def test_zeros_stay_zeros_and_touch_no_other_row(scheme: str) -> None:
    weight = torch.randn(32, 256)
    weight[3] = 0
    weight[8:16, 128:] = 0
    layer = frozen(scheme, weight)
    x = torch.randn(6, 256)
    whole = layer(x)
    x[2] = 0
    y = layer(x)
    assert (y[2] == 0).all()
    assert (y[:, 3] == 0).all()
    if scheme != "tensor_dynamic":
        others = [0, 1, 3, 4, 5]
        assert torch.equal(y[others], whole[others])
    assert (layer(torch.zeros(4, 256)) == 0).all()
    scale = decode(layer.weight_scale)
    assert (scale.isfinite() & (scale > 0)).all()


@pytest.mark.parametrize("scheme", NAMES)
def test_autocast_gives_the_output_its_dtype_and_keeps_the_product_exact(scheme: str) -> None:
    layer = frozen(scheme, torch.randn(64, 256), torch.randn(64))
    x = torch.randn(16, 256)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, layer(x).bfloat16()), "rounded once, after the bias"


@pytest.mark.parametrize("scheme", ["block128", "mxfp8"])
def test_values_of_power_of_two_scales_are_exact_in_bf16(scheme: str) -> None:
    """What the emulation of blocks on a GPU rests on: code * scale needs four significant bits, bf16 has eight."""
    chosen = scheme_named(scheme)
    x = torch.randn(64, 300) * torch.logspace(-30, 30, 64).unsqueeze(1)
    for granularity in (chosen.weight, chosen.activation):
        q = octavo.quantize(x, E4M3, granularity, power_of_two=chosen.power_of_two)
        values = q.dequantize(torch.float32)
        assert values.isfinite().all()
        assert torch.equal(q.dequantize(torch.bfloat16).float(), values)
    other = octavo.quantize(x, E4M3, (1, 128))
    assert not torch.equal(other.dequantize(torch.bfloat16).float(), other.dequantize(torch.float32))


@pytest.mark.parametrize("scheme", NAMES)
def test_state_dict_is_codes_and_scales_and_loads_strictly(scheme: str, tmp_path: Path) -> None:
    layer = frozen(scheme, torch.randn(40, 133), torch.randn(40))
    state = layer.state_dict()
    names = {"weight", "weight_scale", "bias"} | ({"input_scale"} if scheme == "tensor_static" else set())
    assert set(state) == names
    assert state["weight"].dtype == torch.float8_e4m3fn
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    fresh = frozen(scheme, torch.zeros(40, 133), torch.zeros(40), input_scale=1.0)
    fresh.load_state_dict(torch.load(file, weights_only=True), strict=True)
    safetensors.torch.save_file(state, tmp_path / "layer.safetensors")
    saved = safetensors.torch.load_file(tmp_path / "layer.safetensors")
    assigned = frozen(scheme, torch.zeros(40, 133), torch.zeros(40), input_scale=1.0)
    assigned.load_state_dict(saved, strict=True, assign=True)
    x = torch.randn(5, 133)
    assert torch.equal(fresh(x), layer(x))
    assert torch.equal(assigned(x), layer(x))


@pytest.mark.parametrize("scheme", NAMES)
def test_copies_are_equal_and_independent(scheme: str) -> None:
    layer = frozen(scheme, torch.randn(32, 128), torch.randn(32))
    x = torch.randn(4, 128)
    y = layer(x)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(copied(x), y)
        copied.bias.add_(1)
        copied.weight.view(torch.uint8).zero_()
        assert torch.equal(layer(x), y)


@pytest.mark.parametrize("scheme", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_another_dtype_is_for_the_bias_alone(scheme: str, dtype: torch.dtype) -> None:
    layer = frozen(scheme, torch.randn(32, 128), torch.randn(32).to(dtype).float())
    x = torch.randn(4, 128)
    before, y = {k: v.clone() for k, v in layer.state_dict().items()}, layer(x)
    for moved in (layer.to(dtype), layer.half() if dtype == torch.float16 else layer.bfloat16()):
        assert moved.bias.dtype == dtype
        for name in set(before) - {"bias"}:
            now = moved.state_dict()[name]
            assert now.dtype == before[name].dtype
            assert torch.equal(now.reshape(-1).view(torch.uint8), before[name].reshape(-1).view(torch.uint8))
        assert torch.equal(moved(x), y)


@pytest.mark.parametrize("scheme", NAMES)
def test_built_without_memory_and_filled_from_a_checkpoint(scheme: str) -> None:
    layer = frozen(scheme, torch.randn(32, 128), torch.randn(32))
    empty = copy.deepcopy(layer).to("meta")
    assert empty.weight.is_meta
    assert empty.weight_scale.dtype == layer.weight_scale.dtype
    filled = empty.to_empty(device="cpu")
    filled.load_state_dict(layer.state_dict())
    x = torch.randn(4, 128)
    assert torch.equal(filled(x), layer(x))


@pytest.mark.parametrize("scheme", NAMES)
def test_compiled_code_gives_the_same_bits(scheme: str) -> None:
    layer = frozen(scheme, torch.randn(48, 133), torch.randn(48))
    x = torch.randn(7, 133)
    assert torch.equal(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), layer(x))


def test_a_transposed_weight_is_stored_k_major() -> None:
    weight = torch.randn(64, 32).t()
    layer = frozen("row", weight)
    assert layer.weight.is_contiguous()
    assert torch.equal(layer(torch.eye(64)), frozen("row", weight.contiguous())(torch.eye(64)))


def test_high_precision_weights_do_not_load_into_codes() -> None:
    layer = frozen("row", torch.randn(16, 32))
    codes = layer.weight.clone()
    with pytest.raises(RuntimeError, match=r"weight is torch\.float32.*loads torch\.float8_e4m3fn.*before freezing"):
        layer.load_state_dict({"weight": torch.randn(16, 32)}, strict=False)
    with pytest.raises(RuntimeError, match=r"weight_scale is torch\.float16.*loads torch\.float32"):
        layer.load_state_dict({"weight_scale": torch.ones(16, 1).half()}, strict=False)
    assert torch.equal(layer.weight.view(torch.uint8), codes.view(torch.uint8))


@pytest.mark.parametrize("scheme", NAMES)
def test_a_gradient_asked_of_it_is_refused_and_not_lost(scheme: str) -> None:
    layer = frozen(scheme, torch.randn(32, 32))
    x = torch.randn(4, 32, requires_grad=True)
    residual = layer(x) + x
    assert torch.equal(layer(x), layer(x.detach()))
    with pytest.raises(RuntimeError, match=r"passes no gradient: train with octavo\.convert"):
        residual.sum().backward()
    assert not layer(x.detach()).requires_grad
    assert torch.equal(layer(x).relu_(), layer(x).relu()), "what follows may work in place"


@pytest.mark.parametrize("scale", [None, 0.0, -1.0, math.inf, math.nan, 1e-40])
def test_unusable_static_scales_are_refused(scale: float | None) -> None:
    with pytest.raises(ValueError, match=f"input_scale is {scale}.*calibrate"):
        FrozenLinear(torch.randn(4, 4), None, scheme_named("tensor_static"), scale)


def test_inputs_that_do_not_fit_are_named() -> None:
    layer = frozen("row", torch.randn(16, 32))
    for shape in ((2, 16), (0, 16), (4, 16, 31)):
        with pytest.raises(ValueError, match=r"last dimension must be in_features = 32"):
            layer(torch.randn(shape))
    for dtype in (torch.float64, torch.int64):
        with pytest.raises(ValueError, match=f"input has dtype {dtype}"):
            layer(torch.ones(2, 32, dtype=dtype))


@pytest.mark.parametrize("scheme", NAMES)
def test_nothing_is_native_without_fp8_units(scheme: str) -> None:
    assert not frozen(scheme, torch.randn(16, 32)).is_native


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", NAMES)
@pytest.mark.parametrize("shape", [(40, 256, 96), (7, 133, 33)])
def test_on_fp8_units(scheme: str, shape: tuple[int, int, int]) -> None:
    """Native where one scale covers a row or more; the fast accumulator keeps 13 fraction bits of each 32 products."""
    m, k, n = shape
    layer = frozen(scheme, torch.randn(n, k).bfloat16(), torch.randn(n).bfloat16())
    x = torch.randn(m, k).bfloat16()
    reference = layer(x)
    device = copy.deepcopy(layer).cuda()
    assert device.is_native == (scheme not in ("block128", "mxfp8"))
    y = device(x.cuda()).cpu()
    # Twice an output rounding of 2^-8, and 2^-13 of the accumulator: well below 2^-7 of the norm.
    assert (y.float() - reference.float()).norm() <= 2.0**-7 * reference.float().norm()


def test_an_unknown_scheme_lists_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match="unknown scheme 'rowwise': expected one of tensor_static, tensor_dynamic, row"
    ):
        scheme_named("rowwise")
