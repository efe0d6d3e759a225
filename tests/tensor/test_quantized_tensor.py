"""QuantizedTensor: only a number, in everything that moves, copies, saves or shows one."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo import QuantizedTensor
from octavo.scaling.granularity import GRANULARITIES, MX_TRANSPOSED

SPECS = [
    (octavo.E4M3, "tensor"),
    (octavo.E5M2, "tensor"),
    (octavo.E4M3, "row"),
    (octavo.E4M3, "column"),
    (octavo.E4M3, (1, 128)),
    (octavo.E5M2, (128, 1)),
    (octavo.E4M3, (128, 128)),
    (octavo.E4M3, "mx"),
]


def quantized(format: octavo.Format, granularity: object, dtype: torch.dtype = torch.bfloat16) -> QuantizedTensor:
    x = torch.randn(130, 160).to(dtype)
    return octavo.quantize(x, format, granularity)  # type: ignore[arg-type]


def fields(q: QuantizedTensor) -> tuple[object, ...]:
    return (
        q.codes.view(torch.uint8).tolist(),
        q.codes.dtype,
        q.scale.float().tolist(),
        q.scale.dtype,
        q.granularity,
        q.dtype,
        tuple(q.shape),
        q.stride(),
        q.device,
    )


def saved_and_loaded(q: QuantizedTensor) -> QuantizedTensor:
    buffer = io.BytesIO()
    torch.save({"q": q}, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)["q"]


def through_compiled_code(q: QuantizedTensor) -> QuantizedTensor:
    return torch.compile(lambda t: t.detach().clone(), backend="aot_eager", fullgraph=True)(q)


ROUND_TRIPS: dict[str, Callable[[QuantizedTensor], Tensor]] = {
    "detach": lambda q: q.detach(),
    "view": lambda q: q.view(*q.shape),
    "reshape": lambda q: q.reshape(q.shape),
    "t twice": lambda q: q.t().t(),
    "transpose twice": lambda q: q.transpose(0, 1).transpose(-1, -2),
    "T twice": lambda q: q.T.mT,
    "transpose of a dimension with itself": lambda q: q.transpose(1, -1),
    "clone": lambda q: q.clone(),
    "copy": copy.copy,
    "copy_": lambda q: torch.empty_like(q).copy_(q),
    "deepcopy": copy.deepcopy,
    "pickle": lambda q: pickle.loads(pickle.dumps(q)),
    "save and load": saved_and_loaded,
    "to the same": lambda q: q.to("cpu", q.dtype),
    "another dtype and back": lambda q: q.to(torch.float32).to(q.dtype),
    "Parameter": lambda q: nn.Parameter(q).detach(),
    "Parameter in a module's state dict": lambda q: nn.ParameterList([q]).state_dict()["0"],
    "compile": through_compiled_code,
}


@pytest.mark.parametrize("trip", ROUND_TRIPS)
@pytest.mark.parametrize(("format", "granularity"), SPECS)
def test_every_field_survives(trip: str, format: octavo.Format, granularity: object) -> None:
    q = quantized(format, granularity)
    out = ROUND_TRIPS[trip](q)
    assert type(out) is QuantizedTensor
    assert fields(out) == fields(q)
    assert torch.equal(out, q)


def test_fields_that_differ_are_noticed() -> None:
    """The comparison above could not pass on anything: each field alone makes a difference."""
    q = quantized(octavo.E4M3, "row")
    others = [
        QuantizedTensor(q.codes.roll(1), q.scale, q.granularity, q.dtype),
        QuantizedTensor(q.codes, q.scale * 2, q.granularity, q.dtype),
        QuantizedTensor(q.codes, q.scale, q.granularity, torch.float32),
        octavo.quantize(q.dequantize(), octavo.E5M2, "row"),
    ]
    for other in others:
        assert fields(other) != fields(q)
        assert not torch.equal(other, q)
    assert not torch.equal(q, q.dequantize())


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_transposing_moves_the_scales(granularity: object) -> None:
    q = quantized(octavo.E4M3, "mx").t() if granularity is MX_TRANSPOSED else quantized(octavo.E4M3, granularity)
    assert torch.equal(q.t().dequantize(), q.dequantize().t())
    assert q.t().shape == (q.shape[1], q.shape[0])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda q: q.clone(), lambda q: pickle.loads(pickle.dumps(q))])
def test_copies_share_nothing(copied: Callable[[QuantizedTensor], QuantizedTensor]) -> None:
    q = quantized(octavo.E4M3, "row")
    before, other = fields(q), copied(q)
    with torch.no_grad():
        other.mul_(3.0)
    assert fields(q) == before
    assert fields(other) != before


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p)), saved_and_loaded])
def test_a_parameter_stays_one(copied: Callable[[Tensor], Tensor]) -> None:
    for requires_grad in (True, False):
        p = nn.Parameter(quantized(octavo.E4M3, "tensor"), requires_grad=requires_grad)
        other = copied(p)
        assert isinstance(other, nn.Parameter)
        assert isinstance(other, QuantizedTensor)
        assert other.requires_grad is requires_grad
        assert torch.equal(other.detach(), p.detach())


def test_a_gradient_is_copied_with_it() -> None:
    p = nn.Parameter(quantized(octavo.E4M3, "tensor", torch.float32))
    p.dequantize().square().sum().backward()
    assert p.grad is not None
    assert torch.equal(p.grad, 2 * p.detach().dequantize())
    other = copy.deepcopy(p)
    assert torch.equal(other.grad, p.grad)
    assert other.grad is not p.grad


UNSUPPORTED: dict[str, Callable[[QuantizedTensor], object]] = {
    "aten.add.Tensor": lambda q: q + 1,
    "aten.mm.default": lambda q: q @ q.t(),
    "aten.eq.Tensor": lambda q: q == q,
    "aten.sum.default": lambda q: q.sum(),
    "aten.abs.default": lambda q: q.abs(),
    "aten.select.int": lambda q: q[0],
    "aten.slice.Tensor": lambda q: q[1:3],
    "aten.unbind.int": list,
    "aten.cat.default": lambda q: torch.cat([q, q]),
    "aten.expand.default": lambda q: q.expand(2, *q.shape),
    "aten._to_copy.default": lambda q: q.int(),
    "aten.relu_.default": lambda q: q.relu_(),
    "aten._foreach_add.Scalar": lambda q: torch._foreach_add([q], 1.0),
    "aten._local_scalar_dense.default": lambda q: octavo.quantize(torch.ones(()), octavo.E4M3).item(),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_unsupported_operation_names_itself_and_the_remedy(name: str) -> None:
    with pytest.raises(NotImplementedError, match=name.replace(".", r"\.") + r".*dequantize\(\)"):
        UNSUPPORTED[name](quantized(octavo.E4M3, "row"))


@pytest.mark.parametrize("granularity", ["column", (128, 128), (128, 1)])
def test_a_view_that_would_tear_blocks_raises(granularity: object) -> None:
    q = quantized(octavo.E4M3, granularity)
    with pytest.raises(NotImplementedError, match="would tear blocks"):
        q.view(-1)


def test_one_scale_a_tensor_survives_every_view() -> None:
    q = quantized(octavo.E4M3, "tensor")
    assert torch.equal(q.view(-1).view(160, 130).dequantize(), q.dequantize().view(160, 130))


def test_rows_survive_another_split_of_the_leading_dimensions() -> None:
    q = octavo.quantize(torch.randn(4, 6, 40), octavo.E4M3, "row")
    assert torch.equal(q.view(24, 40).dequantize(), q.dequantize().view(24, 40))
    assert torch.equal(q.view(2, 12, 40).dequantize(), q.dequantize().view(2, 12, 40))


@pytest.mark.parametrize("shape", [(), (0,), (5,), (0, 16), (16, 0), (2, 3, 16), (2, 0, 16)])
@pytest.mark.parametrize("granularity", ["tensor", "row", "column", (1, 128), (128, 128), "mx"])
def test_every_number_of_dimensions(shape: tuple[int, ...], granularity: str) -> None:
    x = torch.randn(shape)
    q = octavo.quantize(x, octavo.E4M3, granularity)
    assert q.shape == x.shape
    back = q.dequantize()
    assert back.shape == x.shape
    # E4M3 rounds within 1/16 of a normal value; below the smallest normal, within half of 2^-9 codes, and a code
    # is worth at most amax / 448 * 2 (MX scales are rounded up to a power of two).
    bound = x.abs() / 16 + (x.abs().amax() * 2 / 448 * 2**-10 if x.numel() else 0)
    assert bool(((back - x).abs() <= bound).all())
    assert repr(q).startswith("QuantizedTensor([")


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(64, 48).t(),
        lambda: torch.randn(48, 128)[:, ::2],
        lambda: torch.randn(4, 12, 64).transpose(0, 1),
        lambda: torch.randn(48 * 64 + 1)[1:].view(48, 64),
        lambda: torch.randn(1, 64).expand(48, 64),
    ],
)
@pytest.mark.parametrize("granularity", ["tensor", "row", "mx"])
def test_strides_change_no_code(make: Callable[[], Tensor], granularity: str) -> None:
    """Case 8, of the quantizer: bit-equal to the contiguous copy."""
    x = make()
    a, b = octavo.quantize(x, octavo.E4M3, granularity), octavo.quantize(x.contiguous(), octavo.E4M3, granularity)
    assert torch.equal(a.codes.view(torch.uint8), b.codes.view(torch.uint8))
    assert torch.equal(a.scale.float(), b.scale.float())


def test_printing_shows_format_granularity_and_a_preview() -> None:
    q = octavo.quantize(torch.tensor([[1.0, 2.0], [3.0, 448.0]]), octavo.E4M3)
    text = repr(q)
    for part in ("[1, 2, 3, 448]", "format=E4M3", "granularity=tensor", "scale=1", "shape=[2, 2]", "torch.float32"):
        assert part in text
    assert "…" in repr(quantized(octavo.E4M3, "row"))
    assert repr(q.to("meta")) == str(q.to("meta"))
    assert "device='meta'" in repr(q.to("meta"))


def test_memory_of_the_same_kind_to_be_filled_elsewhere() -> None:
    q = quantized(octavo.E4M3, "row")
    empty = torch.empty_like(q, device="meta")
    assert isinstance(empty, QuantizedTensor)
    assert empty.device.type == empty.codes.device.type == empty.scale.device.type == "meta"
    for made in (torch.zeros_like(q), torch.ones_like(q), torch.empty_like(q, dtype=torch.float32), q.new_zeros(3)):
        assert type(made) is Tensor, "an optimizer's state is no FP8"
    assert torch.zeros_like(q).dtype == q.dtype


IN_PLACE: dict[str, tuple[Callable[[Tensor], object], Callable[[Tensor], Tensor]]] = {
    "mul_": (lambda t: t.mul_(0.5), lambda v: v * 0.5),
    "add_ tensor": (lambda t: t.add_(torch.ones(130, 160), alpha=2.0), lambda v: v + 2),
    "addcdiv_": (lambda t: t.addcdiv_(torch.ones(130, 160), torch.full((130, 160), 4.0)), lambda v: v + 0.25),
    "lerp_": (lambda t: t.lerp_(torch.zeros(130, 160), 0.25), lambda v: v * 0.75),
    "zero_": (lambda t: t.zero_(), torch.zeros_like),
    "copy_": (lambda t: t.copy_(torch.full((130, 160), 7.0)), lambda v: torch.full_like(v, 7.0)),
    "_foreach_mul_": (lambda t: torch._foreach_mul_([t, torch.ones(3)], 0.5), lambda v: v * 0.5),
    "_foreach_add_": (lambda t: torch._foreach_add_([t], [torch.ones(130, 160)], alpha=2.0), lambda v: v + 2),
}


@pytest.mark.parametrize("step", IN_PLACE)
@pytest.mark.parametrize("granularity", ["tensor", "row", (1, 128), "mx", "mx, transposed"])
def test_an_optimizers_step_in_place(step: str, granularity: str) -> None:
    """Decode, change, quantize with fresh scales: the outcome is the quantization of the changed values."""
    if granularity == "mx, transposed":
        q = octavo.quantize(torch.randn(160, 130), octavo.E4M3, "mx").t()
    else:
        q = quantized(octavo.E4M3, granularity, torch.float32)
    codes, values, version = q.codes, q.dequantize(), q._version
    change, expected = IN_PLACE[step]
    with torch.no_grad():
        change(q)
    assert q.codes.data_ptr() == codes.data_ptr(), "the storage stays"
    assert torch.equal(q, octavo.quantize(expected(values), octavo.E4M3, q.granularity))
    assert q._version > version, "caches of it must notice"


def test_a_plain_tensor_takes_values_of_a_quantized_one() -> None:
    q = quantized(octavo.E4M3, "row", torch.float32)
    plain = torch.zeros(130, 160)
    plain.lerp_(q, 0.5)
    assert torch.equal(plain, q.dequantize() * 0.5)
    plain.copy_(q)
    assert torch.equal(plain, q.dequantize())


def test_optimizers_step_it() -> None:
    """AdamW and SGD, one by one, foreach and fused: all within one E4M3 rounding of the step in float32."""
    for kind in (torch.optim.AdamW, torch.optim.SGD):
        for how in ({"foreach": False}, {"foreach": True}, {"fused": True}):
            start = quantized(octavo.E4M3, "row", torch.float32)
            q, reference = nn.Parameter(start.clone()), nn.Parameter(start.dequantize().clone())
            gradient = torch.randn(130, 160)
            for parameter in (q, reference):
                optimizer = kind([parameter], lr=0.25, **how)
                parameter.grad = gradient.clone()
                optimizer.step()
            # What was stored is the quantization of the stepped values; fused and foreach agree to float32
            # rounding, which may move a value over a tie: half a step of E4M3 at most, 1/16 of a value.
            moved = (reference.detach() - start.dequantize()).abs().mean()
            error = (q.detach().dequantize() - reference.detach()).abs()
            assert bool((error <= reference.detach().abs() / 16 + 1e-3).all()), (kind, how)
            assert moved > 0.05


def test_moves_of_dtype_change_what_it_stands_for_only() -> None:
    q = quantized(octavo.E4M3, "tensor")
    half = q.half()
    assert isinstance(half, QuantizedTensor)
    assert half.dtype == torch.float16
    assert half.dequantize().dtype == torch.float16
    assert torch.equal(half.codes.view(torch.uint8), q.codes.view(torch.uint8))


def test_dequantize_rounds_once_and_passes_gradients() -> None:
    q = nn.Parameter(quantized(octavo.E4M3, "row", torch.float32))
    exact = q.detach().codes.double() * q.detach().scale.double()
    assert torch.equal(q.dequantize(torch.float32).detach(), exact.float())
    q.dequantize(torch.bfloat16).sum().backward()
    assert torch.equal(q.grad, torch.ones(130, 160))


def test_attributes_that_people_put_on_it_are_pickled() -> None:
    q = quantized(octavo.E4M3, "row")
    q.role = "expert"
    other = pickle.loads(pickle.dumps(q))
    assert other.role == "expert"
    assert fields(other) == fields(q)
