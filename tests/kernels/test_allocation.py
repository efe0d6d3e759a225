"""Memory by the entry of Inductor's compiled code: what it takes from torch without a promise, and where it lies."""

from __future__ import annotations

import pytest
import torch

from octavo.kernels.allocation import new_on

MADE = [
    ((3, 5), (5, 1), torch.float8_e4m3fn),
    ((2, 16), (16, 1), torch.float8_e5m2),
    ((7,), (1,), torch.float32),
    ((), (), torch.float32),
    ((4, 1), (1, 1), torch.float32),
]


@pytest.mark.parametrize(("shape", "strides", "dtype"), MADE, ids=str)
def test_tensors_are_as_asked_for(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> None:
    twin = torch._C._dynamo.guards._empty_strided_cpu  # type: ignore[attr-defined]
    for new in (new_on(-1), twin):
        first, second = new(shape, strides, dtype), new(shape, strides, dtype)
        assert (first.shape, first.stride(), first.dtype, first.device.type) == (shape, strides, dtype, "cpu")
        assert type(first) is torch.Tensor
        assert not first.requires_grad
        assert first.data_ptr() != second.data_ptr()


def test_a_new_tensor_is_one_of_inference_mode_where_that_is_on() -> None:
    twin = torch._C._dynamo.guards._empty_strided_cpu  # type: ignore[attr-defined]
    with torch.inference_mode():
        assert twin((2,), (1,), torch.float32).is_inference()
    assert not twin((2,), (1,), torch.float32).is_inference()


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "strides", "dtype"), MADE, ids=str)
def test_on_a_gpu_tensors_lie_on_the_current_device(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> None:
    index = torch.cuda.current_device()
    made = new_on(index)(shape, strides, dtype)
    assert (made.shape, made.stride(), made.dtype) == (shape, strides, dtype)
    assert made.device == torch.device("cuda", index)
    assert made.data_ptr() % 16 == 0, "as a scale must be for cuBLASLt"


@pytest.mark.gpu
def test_the_current_device_is_known_in_c() -> None:
    assert torch._C._cuda_getDevice() == torch.cuda.current_device()
    assert torch._C._cuda_getCurrentRawStream(0) == torch.cuda.current_stream(0).cuda_stream
