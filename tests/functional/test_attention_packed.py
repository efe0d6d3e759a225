"""Packed attention: what is handed to torch's varlen_attn, in each form that it has had, with a stand-in on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.attention.varlen
from tests.measures import relative_error
from tests.modules.attention_reference import allowed_pairs, attention_steps, chained
from torch import Tensor

from octavo.functional import attention_packed
from octavo.functional.attention import Attention, Extras
from octavo.functional.attention_mask import Valid, mask_rules
from octavo.functional.attention_packed import Packing, packed_attention, packed_way

H, G, D = 4, 2, 16
LENGTHS_Q, LENGTHS_KV = [3, 6, 1], [7, 6, 5]


def sums(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def flash(
    q: Tensor, k: Tensor, v: Tensor, ends: tuple[Tensor, Tensor], window: tuple[int, int], scale: float
) -> Tensor:
    """What flash computes of packed sequences: windows aligned at the bottom right. [T, H, D]"""
    parts = []
    for b in range(len(ends[0]) - 1):
        (q0, q1), (k0, k1) = ends[0][b : b + 2].tolist(), ends[1][b : b + 2].tolist()
        if q0 == q1 or k0 == k1:
            parts.append(q.new_zeros(q1 - q0, *q.shape[1:]))
            continue
        own = [x[a:e].transpose(0, 1)[None] for x, a, e in ((q, q0, q1), (k, k0, k1), (v, k0, k1))]
        allowed = allowed_pairs("no_mask", window, (1, q1 - q0, k1 - k0))
        parts.append(attention_steps(*own, allowed, scale=scale)[0][0].transpose(0, 1).to(q.dtype))
    return torch.cat(parts)


def form_of_2_10(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
    is_causal: bool = False,
) -> Tensor:  # fmt: skip
    assert query.shape[1] == key.shape[1], "it shares no heads"
    assert max_q >= int(cu_seq_q.diff().max())
    assert max_k >= int(cu_seq_k.diff().max())
    window = (-1, 0) if is_causal else (-1, -1)
    return flash(query, key, value, (cu_seq_q, cu_seq_k), window, query.shape[-1] ** -0.5)


def form_of_2_11(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
) -> Tensor:  # fmt: skip
    assert query.shape[1] == key.shape[1], "it shares no heads"
    assert scale is not None
    return flash(query, key, value, (cu_seq_q, cu_seq_k), window_size, scale)


def form_of_2_12(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    scale: float | None = None, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    assert enable_gqa
    assert scale is not None
    return flash(query, key, value, (cu_seq_q, cu_seq_k), window_size, scale)


def operands() -> list[Tensor]:
    return [torch.randn(sum(n), h, D) for n, h in ((LENGTHS_Q, H), (LENGTHS_KV, G), (LENGTHS_KV, G))]


@pytest.mark.parametrize("form", [form_of_2_10, form_of_2_11, form_of_2_12])
@pytest.mark.parametrize("mask_type", ["padding", "padding_causal_bottom_right"])
def test_varlen_gets_what_the_loop_computes(form: Any, mask_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", form)
    monkeypatch.setattr(attention_packed, "_FOUND", [])
    q, k, v = operands()
    packing = Packing(sums(LENGTHS_Q), sums(LENGTHS_KV))
    setups = [Attention(mask_rules(mask_type), D**-0.5)]
    if form is not form_of_2_10:
        setups += [Attention(mask_rules(mask_type, (2, 0)), 0.7)]
    for setup in setups:
        by_varlen = attention_packed._varlen(q, k, v, setup, packing)
        assert relative_error(packed_attention(q, k, v, setup, packing), by_varlen) < chained(D, 2)
    batch = [torch.randn(3, h, n, D) for h, n in ((H, 4), (G, 9), (G, 9))]
    monkeypatch.setattr(attention_packed, "_varlen_reasons", lambda *_: [])
    even = attention_packed.unpadded_attention(batch[0], batch[1], batch[2], setups[-1])
    allowed = allowed_pairs(mask_type.removeprefix("padding_"), setups[-1].rules.window, (3, 4, 9))
    exact, _ = attention_steps(batch[0], batch[1], batch[2], allowed, scale=setups[-1].scale)
    assert relative_error(exact, even) < chained(D, 2)


def test_a_padded_batch_is_packed_for_varlen_with_one_list_of_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flash aligns at the bottom right: "padding_causal" may go there only if queries and keys are of one length."""
    seen: list[Packing] = []

    def record(q: Tensor, k: Tensor, v: Tensor, setup: Attention, packing: Packing, slopes: Any = None) -> Tensor:
        seen.append(packing)
        return torch.zeros_like(q)

    monkeypatch.setattr(attention_packed, "packed_attention", record)
    real = torch.arange(6) < torch.tensor([6, 2, 0])[:, None]
    q, k = torch.randn(3, H, 6, D), torch.randn(3, G, 6, D)
    setup = Attention(mask_rules("padding_causal"), 1.0)
    attention_packed.padded_attention(q, k, k, setup, Valid(real, real), Extras())
    attention_packed.padded_attention(q, k, k, setup, Valid(real, real.clone()), Extras())
    assert seen[0].cu_q is seen[0].cu_kv
    assert seen[1].cu_q is not seen[1].cu_kv
    for packing in seen:
        assert packing.cu_q.tolist() == packing.cu_kv.tolist() == [0, 6, 8, 8]
        assert packing.cu_q.dtype is torch.int32
        assert (packing.max_q, packing.max_kv) == (6, 6)


class _LikeFlash(torch.autograd.Function):
    """Writes nothing where there is no sequence, neither results nor gradients: what lay there before is NaN."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_kv: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(q, k, v, cu_q, cu_kv)
        ctx.scale = scale
        return _LikeFlash.inside(q, k, v, cu_q, cu_kv, scale)

    @staticmethod
    def inside(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_kv: Tensor, scale: float) -> Tensor:
        out = flash(q, k, v, (cu_q, cu_kv), (-1, 0), scale)
        return torch.cat((out, torch.full((q.shape[0] - out.shape[0], *out.shape[1:]), torch.nan)))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        *operands, cu_q, cu_kv = ctx.saved_tensors
        leaves = [x.detach().requires_grad_() for x in operands]
        with torch.enable_grad():
            out = flash(leaves[0], leaves[1], leaves[2], (cu_q, cu_kv), (-1, 0), ctx.scale)
        out.backward(dy[: out.shape[0]])
        gradients = []
        for leaf, cu in zip(leaves, (cu_q, cu_kv, cu_kv), strict=True):
            gradient = leaf.grad
            assert gradient is not None
            gradient[int(cu[-1]) :] = torch.nan
            gradients.append(gradient)
        return *gradients, None, None, None


def like_flash(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    scale: float, window_size: tuple[int, int],
) -> Tensor:  # fmt: skip
    assert window_size == (-1, 0)
    out: Tensor = _LikeFlash.apply(query, key, value, cu_seq_q, cu_seq_k, scale)
    return out


def gradients_of(attend: Any, operands: list[Tensor], dy: Tensor) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in operands]
    out = attend(*leaves)
    out.backward(dy)
    return [out.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[misc]


def test_nothing_that_flash_leaves_unwritten_gets_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A padded batch and a packed one with tokens behind the last sequence, through flash and through the loop."""
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", like_flash)
    monkeypatch.setattr(attention_packed, "_FOUND", [])
    setup = Attention(mask_rules("padding_causal"), 0.3)
    real = torch.arange(6) < torch.tensor([4, 0, 6])[:, None]
    valid, packing = Valid(real, real), Packing(ends := sums([4, 5]), ends)
    batch, tokens = ([torch.randn(*lead, D) for lead in leads] for leads in (
        ((3, H, 6), (3, G, 6), (3, G, 6)), ((11, H), (11, G), (11, G))
    ))  # fmt: skip
    padded = lambda q, k, v: attention_packed.padded_attention(q, k, v, setup, valid)  # noqa: E731
    packed = lambda q, k, v: packed_attention(q, k, v, setup, packing)  # noqa: E731
    gone = ~real[:, None, :, None], torch.arange(11)[:, None, None] >= 9
    for attend, operands, nobody in zip((padded, packed), (batch, tokens), gone, strict=True):
        dy = torch.randn(*operands[0].shape)
        by_loop = gradients_of(attend, operands, dy)
        with monkeypatch.context() as patched:
            patched.setattr(attention_packed, "_varlen_reasons", lambda *_: [])
            by_flash = gradients_of(attend, operands, dy)
        for one, other in zip(by_loop, by_flash, strict=True):
            assert relative_error(one, other) < chained(D, 4)
            assert not other.masked_select(nobody).any()


REASONS: list[tuple[dict[str, Any], str]] = [
    ({"dropout": 0.1}, "attention dropout"),
    ({"slopes": torch.ones(H)}, "ALiBi"),
    ({"features": 260}, "heads of 260 and 260: flash takes equal ones"),
    ({"mask_type": "padding_causal"}, "of different lengths: flash aligns at the bottom right"),
    ({"form": form_of_2_10, "window": (2, 0), "mask_type": "padding_causal_bottom_right"}, "has no sliding window"),
    ({"form": form_of_2_10, "scale": 0.3}, "has no scale"),
]


@pytest.mark.parametrize(("case", "sentence"), REASONS)
def test_what_keeps_a_call_from_varlen(case: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", case.get("form", form_of_2_11))
    monkeypatch.setattr(attention_packed, "_FOUND", [])
    features = case.get("features", D)
    q, v = (_OnCUDA(torch.randn(5, H, features, dtype=torch.bfloat16)) for _ in range(2))
    rules = mask_rules(case.get("mask_type", "padding"), case.get("window"))
    setup = Attention(rules, case.get("scale", features**-0.5), case.get("dropout", 0.0))
    packing = Packing(torch.tensor([0, 5]), torch.tensor([0, 5]))
    [reason] = attention_packed._varlen_reasons(q, v, setup, packing.cu_q is packing.cu_kv, case.get("slopes"))
    assert sentence in reason


class _OnCUDA:
    """What looks like a tensor on a GPU to whoever asks for its device, dtype and shape."""

    is_cuda = True

    def __init__(self, x: Tensor) -> None:
        self.dtype, self.shape = x.dtype, x.shape


def test_without_reasons_it_is_varlen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", form_of_2_11)
    monkeypatch.setattr(attention_packed, "_FOUND", [])
    q: Any = _OnCUDA(torch.randn(5, H, D, dtype=torch.bfloat16))
    packing = Packing(torch.tensor([0, 5]), torch.tensor([0, 5]))
    assert packed_way(q, q, Attention(mask_rules("padding"), D**-0.5), packing) == ("varlen", ())
    q.dtype = torch.float32
    for capturing, name in ((False, "loop"), (True, "blocks")):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda captures=capturing: captures)
        way = packed_way(q, q, Attention(mask_rules("padding"), D**-0.5), packing)
        assert way.name == name
        assert "takes float16 and bfloat16" in way.reasons[0]
