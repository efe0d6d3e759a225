"""scale_from_amax: the rule of `scaling` as one operation; compiled; and the Triton twin on a GPU."""

from __future__ import annotations

import pytest
import torch
from tests.formats.edge_values import random_bits, special_float32
from torch import Tensor

from octavo.formats import E4M3, E5M2, Format
from octavo.kernels import scale_from_amax
from octavo.kernels.scale_from_amax import scale_from_amax_reference, unsupported_reasons

OPTIONS = [(0.0, False), (0.0, True), (1e-3, False), (1e-3, True)]


def test_literal_scales() -> None:
    multiplier, scale = scale_from_amax(torch.tensor([448.0, 224.0, 0.0, 3.5, 1e-40]), E4M3)
    assert multiplier.tolist() == [1.0, 2.0, 1.0, 128.0, 2.0**126]
    assert scale.tolist() == [1.0, 0.5, 1.0, 2.0**-7, 2.0**-126]
    # 448 / 3 = 149.33: the power of two below is 128.
    multiplier, scale = scale_from_amax(torch.tensor([3.0]), E4M3, power_of_two=True)
    assert (multiplier.item(), scale.item()) == (128.0, 2.0**-7)
    multiplier, _ = scale_from_amax(torch.tensor([3.0, 0.0]), E4M3, epsilon=7.0)
    assert multiplier.tolist() == [64.0, 64.0]


@pytest.mark.parametrize("shape", [(), (1,), (3, 1), (1, 5), (0, 1)], ids=str)
def test_scales_have_the_shape_of_the_amax(shape: tuple[int, ...]) -> None:
    amax = torch.full(shape, 7.0)
    for value, expected in zip(scale_from_amax(amax, E4M3), (64.0, 1 / 64), strict=True):
        assert value.shape == shape
        assert value.dtype == torch.float32
        assert (value == expected).all()


@pytest.mark.parametrize(("epsilon", "power_of_two"), OPTIONS)
def test_compiled_into_one_graph_it_gives_the_same(epsilon: float, power_of_two: bool) -> None:
    torch._dynamo.reset()

    def scaled(amax: Tensor) -> tuple[Tensor, Tensor]:
        return scale_from_amax(amax * 3, E5M2, epsilon, power_of_two)

    compiled = torch.compile(scaled, fullgraph=True, backend="aot_eager")
    amax = torch.rand(1000).pow(8)
    for found, expected in zip(compiled(amax), scaled(amax), strict=True):
        assert torch.equal(found, expected)


def test_the_operator_describes_itself_rightly() -> None:
    torch.library.opcheck(torch.ops.octavo.scale_from_amax.default, (torch.rand(4, 1), "E4M3", (0.0).hex(), True))


def test_a_tensor_off_the_gpu_takes_the_reference_and_says_why() -> None:
    assert unsupported_reasons(torch.ones(2)) == ["the tensor is on cpu: Triton kernels need a CUDA device"]


@pytest.mark.gpu
@pytest.mark.parametrize(("epsilon", "power_of_two"), OPTIONS)
@pytest.mark.parametrize("format", [E4M3, E5M2], ids=repr)
def test_triton_and_reference_agree_to_the_bit(format: Format, epsilon: float, power_of_two: bool) -> None:
    amax = torch.cat([special_float32(), random_bits((10_000_000,), torch.float32)]).abs()
    amax = amax[amax.isfinite()]
    expected = scale_from_amax_reference(amax, format, epsilon, power_of_two)
    found = scale_from_amax(amax.cuda(), format, epsilon, power_of_two)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a.cpu().view(torch.int32), b.view(torch.int32))
