"""octavo.DotProductAttention: formats give one another's numbers, packed sequences the bits of padded ones; options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.measures import relative_error
from tests.modules.attention_reference import FLOAT32, allowed_pairs, attention_bound, attention_steps, chained
from torch import Tensor

from octavo import DotProductAttention

H, G, D = 4, 2, 16
LENGTHS = [5, 0, 33, 1, 20]


def operands(*lead: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k, v with their heads in the last two dimensions."""
    return [torch.randn(*lead, heads, D, dtype=dtype) for heads in (H, G, G)]


def sums(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def packed(x: Tensor, lengths: list[int]) -> Tensor:
    """[B, S, ...] -> [T, ...]"""
    return torch.cat([x[b, :n] for b, n in enumerate(lengths)])


def heads_first(x: Tensor) -> Tensor:
    """[B, S, H, D] -> [B, H, S, D]"""
    return x.transpose(1, 2)


def run(layer: DotProductAttention, qkv: list[Tensor], dy: Tensor, **call: Any) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in qkv]
    out = layer(*leaves, **call)
    out.backward(dy)
    return [out.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[misc]


def test_formats_are_views_of_one_another() -> None:
    q, k, v = operands(3, 9)
    layer = DotProductAttention(H, D, G)
    dy = torch.randn(3, 9, H * D)
    bshd = run(layer, [q, k, v], dy, qkv_format="bshd")
    sbhd = run(layer, [x.transpose(0, 1) for x in (q, k, v)], dy.transpose(0, 1), qkv_format="sbhd")
    for one, other in zip(bshd, sbhd, strict=True):
        assert torch.equal(one, other.transpose(0, 1))
    exact, magnitudes = attention_steps(*(heads_first(x) for x in (q, k, v)), allowed_pairs("causal", None, (3, 9, 9)))
    bound = attention_bound(heads_first(q), heads_first(k), magnitudes, FLOAT32)
    assert ((heads_first(bshd[0].unflatten(-1, (H, D))).double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("window", [None, (4, 0)])
@pytest.mark.parametrize("mask_type", ["padding", "padding_causal", "padding_causal_bottom_right"])
def test_packed_sequences_give_the_bits_of_padded_ones(
    mask_type: str, window: tuple[int, int] | None, alibi: bool, dtype: torch.dtype
) -> None:
    longest = max(LENGTHS)
    q, k, v = operands(len(LENGTHS), longest, dtype=dtype)
    dy = torch.randn(len(LENGTHS), longest, H * D, dtype=dtype)
    layer = DotProductAttention(H, D, G, attn_mask_type=mask_type, window_size=window)
    call: dict[str, Any] = {"core_attention_bias_type": "alibi"} if alibi else {}
    mask = (torch.arange(longest) >= torch.tensor(LENGTHS)[:, None])[:, None, None, :]
    padded = run(layer, [q, k, v], dy, qkv_format="bshd", attention_mask=mask, **call)
    together = run(
        layer,
        [packed(x, LENGTHS) for x in (q, k, v)],
        packed(dy, LENGTHS),
        qkv_format="thd",
        cu_seqlens_q=sums(LENGTHS),
        **call,
    )
    for one, other in zip(padded, together, strict=True):
        assert torch.equal(packed(one, LENGTHS), other)
        # What is padding gives nothing and gets nothing.
        assert not one[mask[:, 0, 0]].any()
    # And each sequence is what it is alone.
    start = 5
    alone = DotProductAttention(
        H, D, G, attn_mask_type=mask_type.removeprefix("padding_").replace("padding", "no_mask")
    )
    own = [x[2:3, :33] for x in (q, k, v)]
    out = alone(*own, qkv_format="bshd", window_size=window, **call)
    assert torch.equal(out[0], together[0][start : start + 33])


def test_lengths_and_masks_say_the_same() -> None:
    q, k, v = operands(len(LENGTHS), 33)
    layer = DotProductAttention(H, D, G, attn_mask_type="padding_causal", qkv_format="bshd")
    mask = torch.arange(33) >= torch.tensor(LENGTHS)[:, None]
    by_lengths = layer(q, k, v, cu_seqlens_q=sums(LENGTHS))
    assert torch.equal(layer(q, k, v, attention_mask=mask), by_lengths)
    assert torch.equal(layer(q, k, v, attention_mask=(mask, mask)), by_lengths)


def test_packed_queries_and_keys_of_different_lengths() -> None:
    lengths_q, lengths_kv = [3, 4, 0], [7, 2, 5]
    q, k, v = (torch.randn(n, heads, D) for n, heads in ((7, H), (14, G), (14, G)))
    layer = DotProductAttention(H, D, G, qkv_format="thd", attn_mask_type="padding_causal_bottom_right")
    out = layer(q, k, v, cu_seqlens_q=sums(lengths_q), cu_seqlens_kv=sums(lengths_kv))
    at_q = at_kv = 0
    for n_q, n_kv in zip(lengths_q, lengths_kv, strict=True):
        own_q, own_k, own_v = q[at_q : at_q + n_q], k[at_kv : at_kv + n_kv], v[at_kv : at_kv + n_kv]
        at_q, at_kv = at_q + n_q, at_kv + n_kv
        batched = [heads_first(x[None]) for x in (own_q, own_k, own_v)]
        exact, magnitudes = attention_steps(*batched, allowed_pairs("causal_bottom_right", None, (1, n_q, n_kv)))
        mine = heads_first(out[at_q - n_q : at_q].unflatten(-1, (H, D))[None])
        bound = attention_bound(batched[0], batched[1], magnitudes, FLOAT32) if n_q else torch.zeros(())
        assert ((mine.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("mask_type", ["causal", "padding_causal", "padding_causal_bottom_right", "padding"])
@pytest.mark.parametrize("alibi", [False, True])
def test_compiled_packed_attention_is_the_eager_one_to_rounding(mask_type: str, alibi: bool) -> None:
    qkv = operands(sum(LENGTHS) + 2)
    layer = DotProductAttention(H, D, G, qkv_format="thd", attn_mask_type=mask_type)
    call: dict[str, Any] = {"core_attention_bias_type": "alibi"} if alibi else {}
    call["cu_seqlens_q"] = sums(LENGTHS)
    dy = torch.randn(sum(LENGTHS) + 2, H * D)
    torch._dynamo.reset()
    compiled: Any = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for one, other in zip(run(layer, qkv, dy, **call), run(compiled, qkv, dy, **call), strict=True):
        assert relative_error(one, other) < chained(D, 4)
        # The two tokens behind the last sequence are padding.
        assert not one[-2:].any()
        assert not other[-2:].any()


@pytest.mark.parametrize("mask_type", ["padding", "padding_causal", "padding_causal_bottom_right"])
def test_compiled_packed_queries_and_keys_of_different_lengths(mask_type: str) -> None:
    lengths_q, lengths_kv = [3, 4, 2], [7, 2, 5]
    qkv = [torch.randn(n, heads, D) for n, heads in ((9, H), (14, G), (14, G))]
    layer = DotProductAttention(H, D, G, qkv_format="thd", attn_mask_type=mask_type, window_size=(3, -1))
    call = {"cu_seqlens_q": sums(lengths_q), "cu_seqlens_kv": sums(lengths_kv)}
    torch._dynamo.reset()
    compiled: Any = torch.compile(layer, fullgraph=True, backend="aot_eager")
    dy = torch.randn(9, H * D)
    for one, other in zip(run(layer, qkv, dy, **call), run(compiled, qkv, dy, **call), strict=True):
        assert relative_error(one, other) < chained(D, 4)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("mask_type", ["no_mask", "causal", "padding_causal", "arbitrary"])
def test_compiled_without_a_break(mask_type: str, fp8: bool) -> None:
    qkv, dy = operands(3, 9), torch.randn(3, 9, H * D)
    layer = DotProductAttention(H, D, G, qkv_format="bshd", attn_mask_type=mask_type, fp8_attention=fp8)
    call: dict[str, Any] = {}
    if mask_type == "padding_causal":
        call["attention_mask"] = torch.arange(9) >= torch.tensor([9, 4, 2])[:, None]
    if mask_type == "arbitrary":
        call["attention_mask"] = torch.rand(3, 1, 9, 9) < 0.3
    torch._dynamo.reset()
    compiled: Any = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for one, other in zip(run(layer, qkv, dy, **call), run(compiled, qkv, dy, **call), strict=True):
        # Compiled code does not pack a padded batch: it gives the same to rounding.
        assert relative_error(one, other) <= (chained(D, 4) if mask_type == "padding_causal" else 0)


def test_pre_scale_bias_is_scaled_and_post_scale_bias_is_not() -> None:
    q, k, v = operands(3, 9)
    bias = torch.randn(1, H, 9, 9)
    layer = DotProductAttention(H, D, G, qkv_format="bshd", softmax_scale=0.5)
    pre = layer(q, k, v, core_attention_bias_type="pre_scale_bias", core_attention_bias=bias)
    post = layer(q, k, v, core_attention_bias_type="post_scale_bias", core_attention_bias=bias * 0.5)
    assert torch.equal(pre, post)
    exact, magnitudes = attention_steps(
        *(heads_first(x) for x in (q, k, v)), allowed_pairs("causal", None, (3, 9, 9)), bias * 0.5, 0.5
    )
    # Scores are up to 2 / (1 / sqrt(D)) times those of the usual scale, so is their rounding; the bias adds its own.
    bound = 4 * attention_bound(heads_first(q), heads_first(k), magnitudes, FLOAT32)
    assert ((heads_first(pre.unflatten(-1, (H, D))).double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("qkv_format", ["sbhd", "bshd", "thd"])
def test_recomputed_attention_gives_the_same_bits_dropout_included(qkv_format: str) -> None:
    lead = (18,) if qkv_format == "thd" else (9, 2)
    qkv, dy = operands(*lead), torch.randn(*lead, H * D)
    call: dict[str, Any] = {"cu_seqlens_q": sums([9, 9])} if qkv_format == "thd" else {}
    layer = DotProductAttention(H, D, G, 0.3, qkv_format, fp8_attention=True)
    outcomes = []
    for recomputed in (False, True):
        torch.manual_seed(1)
        outcomes.append(run(layer, qkv, dy, checkpoint_core_attention=recomputed, **call))
    for one, other in zip(*outcomes, strict=True):
        assert torch.equal(one, other)


def test_recomputed_attention_keeps_its_operands_alone() -> None:
    q, k, v = (x.requires_grad_() for x in operands(64, 2))
    mask = torch.rand(2, 1, 64, 64) < 0.3
    layer = DotProductAttention(H, D, G, attn_mask_type="arbitrary")

    def kept(recomputed: bool) -> int:
        seen: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            layer(q, k, v, attention_mask=mask, checkpoint_core_attention=recomputed)
        return sum(seen.values())

    operand_bytes = sum(x.nbytes for x in (q, k, v))
    assert kept(True) == operand_bytes
    # Else the result and the mask too, at the least.
    assert kept(False) >= operand_bytes + q.nbytes + mask.nbytes


def test_dropout_is_for_training() -> None:
    q, k, v = operands(9, 2)
    layer, without = DotProductAttention(H, D, G, 0.5), DotProductAttention(H, D, G)
    assert not torch.equal(layer(q, k, v), without(q, k, v))
    assert torch.equal(layer.eval()(q, k, v), without(q, k, v))


def test_dropped_probabilities_are_made_up_for() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(64, 64, 8, D), torch.randn(64, 64, 8, D)
    out = DotProductAttention(8, D, None, 0.25, attn_mask_type="no_mask")(q, k, torch.ones(64, 64, 8, D))
    # Each result is a mean of 1s of which a quarter is missing, times 4/3. One head of one sequence draws for its 64
    # queries alone, all features alike: 64 * 64 * 8 results of deviation at most 0.58.
    assert abs(float(out.mean()) - 1) < 6 * 0.58 / (64 * 64 * 8) ** 0.5


def test_under_autocast_products_run_in_its_dtype() -> None:
    q, k, v = operands(9, 2)
    layer = DotProductAttention(H, D, G)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(q, k, v)
    assert out.dtype is torch.bfloat16
    assert torch.equal(out, layer(q.bfloat16(), k.bfloat16(), v.bfloat16()))


def test_values_may_be_wider_than_keys() -> None:
    q, k, v = torch.randn(9, 2, H, 8), torch.randn(9, 2, G, 8), torch.randn(9, 2, G, 24)
    out = DotProductAttention(H, (8, 24), G)(q, k, v)
    batched = [x.permute(1, 2, 0, 3) for x in (q, k, v)]
    exact, magnitudes = attention_steps(*batched, allowed_pairs("causal", None, (2, 9, 9)))
    mine = out.unflatten(-1, (H, 24)).permute(1, 2, 0, 3)
    assert ((mine.double() - exact).abs() <= attention_bound(batched[0], batched[1], magnitudes, FLOAT32)).all()


def test_the_layer_says_how_it_computes() -> None:
    q, k, v = operands(33, 5)
    assert (
        DotProductAttention(H, D, G).way(q, k, v) == "scaled_dot_product_attention, by the kernel that torch has on cpu"
    )
    windowed = DotProductAttention(H, D, G, window_size=(2, 0), fp8_attention=True)
    said = windowed.way(q, k, v)
    assert "with a mask tensor (cpu: varlen_attn is for CUDA), FP8 operands emulated (heads of 16" in said
    assert said.endswith("a sliding window)")
    padded = DotProductAttention(H, D, G, attn_mask_type="padding")
    mask = torch.zeros(5, 33, dtype=torch.bool)
    said = padded.way(q, k, v, attention_mask=mask)
    assert said == "packed first, a loop over sequences (cpu: varlen_attn is for CUDA)"
    bias = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": torch.zeros(1, 1, 33, 33)}
    assert padded.way(q, k, v, attention_mask=mask, **bias).endswith("with a mask tensor (a bias of each position)")
    thd = DotProductAttention(H, D, G, qkv_format="thd")
    assert thd.way(q[:, 0], k[:, 0], v[:, 0], cu_seqlens_q=sums([33])).startswith("a loop over sequences (cpu")


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"num_gqa_groups": 3}, {}, "num_attention_heads is 4 and num_gqa_groups 3"),
    ({"qkv_format": "bhsd"}, {}, "qkv_format is 'bhsd': expected one of sbhd, bshd, thd"),
    ({"attention_dropout": 1.0}, {}, "attention_dropout is 1.0: it must be a probability"),
    ({"attn_mask_type": "padding"}, {}, "attention_mask .* or cu_seqlens_q must say where the padding is"),
    ({"attn_mask_type": "arbitrary"}, {}, "attention_mask must be a tensor"),
    ({}, {"attention_mask": torch.zeros(2, 9, dtype=torch.bool)}, "attn_mask_type='causal', which takes none"),
    ({"attn_mask_type": "padding"}, {"attention_mask": torch.zeros(2, 9)}, "has dtype torch.float32: expected bool"),
    (
        {"attn_mask_type": "padding"},
        {"attention_mask": torch.zeros(2, 8, dtype=torch.bool)},
        "is for 8 queries and 8 keys, and there are 9 and 9",
    ),
    ({}, {"core_attention_bias": torch.zeros(9, 9)}, "a bias goes with 'pre_scale_bias' or 'post_scale_bias'"),
    ({}, {"core_attention_bias_type": "post_scale_bias"}, "core_attention_bias is None"),
    ({}, {"core_attention_bias_type": "slanted"}, "expected one of no_bias"),
    ({}, {"alibi_slopes": torch.zeros(4)}, "core_attention_bias_type must be 'alibi' then"),
    ({}, {"alibi_slopes": torch.zeros(3), "core_attention_bias_type": "alibi"}, r"expected \[4\], one for each head"),
    ({"qkv_format": "thd"}, {}, "has 3 dimensions"),
]


@pytest.mark.parametrize(("options", "call", "sentence"), REFUSED)
def test_contradictions_are_refused(options: dict[str, Any], call: dict[str, Any], sentence: str) -> None:
    q, k, v = operands(9, 2)
    with pytest.raises(ValueError, match=sentence):
        DotProductAttention(H, D, **{"num_gqa_groups": G, **options})(q, k, v, **call)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        ({}, "needs cu_seqlens_q"),
        ({"cu_seqlens_q": sums([9]), "attention_mask": torch.zeros(9, dtype=torch.bool)}, "takes no attention_mask"),
        (
            {"cu_seqlens_q": sums([9]), "core_attention_bias": torch.zeros(9, 9)},
            "takes no core_attention_bias",
        ),
    ],
)
def test_packed_sequences_refuse_what_belongs_to_padded_ones(call: dict[str, Any], sentence: str) -> None:
    q, k, v = operands(9)
    with pytest.raises(ValueError, match=sentence):
        DotProductAttention(H, D, G, qkv_format="thd")(q, k, v, **call)


@pytest.mark.gpu
@pytest.mark.parametrize("mask_type", ["causal", "padding", "padding_causal_bottom_right"])
def test_on_a_gpu_packed_sequences_go_through_varlen_attention(mask_type: str) -> None:
    lengths = [128, 1, 300, 64]
    qkv = [torch.randn(sum(lengths), heads, 64, dtype=torch.bfloat16, device="cuda") for heads in (8, 2, 2)]
    layer = DotProductAttention(8, 64, 2, qkv_format="thd", attn_mask_type=mask_type)
    cu = sums(lengths).cuda()
    assert layer.way(*qkv, cu_seqlens_q=cu).startswith("varlen_attn")
    dy = torch.randn(sum(lengths), 8 * 64, dtype=torch.bfloat16, device="cuda")
    on_gpu = run(layer, qkv, dy, cu_seqlens_q=cu, max_seqlen_q=300)
    exact = run(layer, [x.double().cpu() for x in qkv], dy.double().cpu(), cu_seqlens_q=cu.cpu())
    for one, other in zip(exact, on_gpu, strict=True):
        # Probabilities, results and gradients are rounded to bfloat16: some 2^-9 each, of up to eight roundings.
        assert relative_error(one, other) < 8 * 2.0**-9


@pytest.mark.gpu
@pytest.mark.parametrize(("mask_type", "tokens"), [("causal", 300), ("causal_bottom_right", 129), ("no_mask", 300)])
def test_on_a_gpu_a_window_needs_no_mask_tensor(mask_type: str, tokens: int) -> None:
    window = (100, 0 if "causal" in mask_type else 20)
    layer = DotProductAttention(8, 64, 2, qkv_format="bshd", attn_mask_type=mask_type, window_size=window)
    qkv = [torch.randn(2, n, h, 64, dtype=torch.bfloat16, device="cuda") for n, h in ((tokens, 8), (300, 2), (300, 2))]
    assert layer.way(*qkv) == "varlen_attn"
    dy = torch.randn(2, tokens, 8 * 64, dtype=torch.bfloat16, device="cuda")
    exact = run(layer, [x.double().cpu() for x in qkv], dy.double().cpu())
    for one, other in zip(exact, run(layer, qkv, dy), strict=True):
        # As above.
        assert relative_error(one, other) < 8 * 2.0**-9


@pytest.mark.gpu
def test_on_a_gpu_a_padded_batch_is_packed_without_waiting_for_the_device() -> None:
    lengths = [300, 1, 128]
    layer = DotProductAttention(8, 64, 2, qkv_format="bshd", attn_mask_type="padding_causal")
    qkv = [torch.randn(3, 300, heads, 64, dtype=torch.bfloat16, device="cuda") for heads in (8, 2, 2)]
    mask = torch.arange(300, device="cuda") >= torch.tensor(lengths, device="cuda")[:, None]
    dy = torch.randn(3, 300, 8 * 64, dtype=torch.bfloat16, device="cuda")
    assert layer.way(*qkv, attention_mask=mask) == "packed first, varlen_attn"
    torch.cuda.set_sync_debug_mode("error")
    try:
        on_gpu = run(layer, qkv, dy, attention_mask=mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    exact = run(layer, [x.double().cpu() for x in qkv], dy.double().cpu(), attention_mask=mask.cpu())
    for one, other in zip(exact, on_gpu, strict=True):
        assert relative_error(one, other) < 8 * 2.0**-9
        assert not other[mask].any()
