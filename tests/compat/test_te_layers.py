"""Layers under Transformer Engine's names: arguments, initialisation, state dict names, and Octavo's numbers."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from octavo.compat.transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from torch import Tensor, nn

import octavo
import octavo.compat.transformer_engine.pytorch as te

H, F, N = 32, 64, 4


def in_fp8(run: Callable[[], Any], recipe: Any = None) -> Any:
    with te.fp8_autocast(enabled=True, fp8_recipe=recipe or Float8CurrentScaling()):
        return run()


def transformer_layer(**options: Any) -> te.TransformerLayer:
    settings = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "device": "cpu", **options}
    return te.TransformerLayer(H, F, N, **settings)


def names(layer: nn.Module) -> list[str]:
    return [name for name, _ in layer.named_parameters()]


ATTENTION = "self_attention"
MLP = [f"layernorm_mlp.{name}" for name in ("fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")]


def with_both(prefix: str, *parts: str) -> list[str]:
    return [f"{prefix}.{part}{kind}" for part in parts for kind in ("weight", "bias")]


def test_parameters_of_a_transformer_layer_have_transformer_engines_names() -> None:
    qkv, cross = f"{ATTENTION}.layernorm_qkv", "inter_attention"
    norm = with_both("layernorm_mlp", "layer_norm_")
    parts = with_both(qkv, "layer_norm_", "query_", "key_", "value_")
    encoder = {*parts, *with_both(f"{ATTENTION}.proj", ""), *norm, *MLP}
    assert set(names(transformer_layer())) == encoder == set(transformer_layer().state_dict())
    fused = {*with_both(qkv, "layer_norm_", ""), *with_both(f"{ATTENTION}.proj", ""), *norm, *MLP}
    assert set(names(transformer_layer(fuse_qkv_params=True))) == fused
    decoder = {*with_both(f"{cross}.layernorm_query", "layer_norm_", "query_"), *with_both(f"{cross}.proj", "")}
    decoder |= set(with_both(f"{cross}.key_value", "key_", "value_"))
    assert set(names(transformer_layer(layer_type="decoder"))) == encoder | decoder
    output = set(names(transformer_layer(output_layernorm=True)))
    assert {*with_both("layernorm", ""), *with_both(f"{ATTENTION}.qkv", "query_", "key_", "value_")} <= output


def test_parameters_come_in_the_order_of_the_forward() -> None:
    """Optimizers keep their state by the number of a parameter."""
    found = [name.split(".")[:2] for name in names(transformer_layer(qk_norm_type="RMSNorm"))]
    order = [list(pair) for pair in OrderedDict.fromkeys(map(tuple, found))]
    attention = [[ATTENTION, part] for part in ("q_norm", "k_norm", "layernorm_qkv", "proj")]
    assert order[:4] == attention
    assert all(pair[0] == "layernorm_mlp" for pair in order[4:])


def test_weights_are_drawn_as_transformer_engine_draws_them() -> None:
    layer = te.TransformerLayer(256, 512, 4, zero_centered_gamma=True, device="cpu", normalization="RMSNorm")
    for name, parameter in layer.named_parameters():
        if parameter.dim() == 2:
            # The deviation of n draws is known to 1 / sqrt(2 n); five of those.
            assert parameter.std().item() == pytest.approx(0.023, rel=5 / math.sqrt(2 * parameter.numel())), name
        else:
            assert not parameter.any(), name  # biases, and gammas that are distances from 1
    constant = te.LayerNormMLP(
        H, F, init_method=nn.init.ones_, output_layer_init_method=nn.init.zeros_, device="cpu", params_dtype=torch.half
    )
    assert bool((constant.fc1_weight == 1).all())
    assert not constant.fc2_weight.any()
    assert {parameter.dtype for parameter in constant.parameters()} == {torch.half}
    assert bool((constant.layer_norm_weight == 1).all())


PAIRS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "norm": (lambda: te.LayerNorm(H, device="cpu"), lambda: octavo.LayerNorm(H)),
    "rms_norm": (
        lambda: te.RMSNorm(hidden_size=H, eps=1e-3, zero_centered_gamma=True, device="cpu"),
        lambda: octavo.RMSNorm(H, 1e-3, zero_centered_gamma=True),
    ),
    "layernorm_linear": (
        lambda: te.LayerNormLinear(H, F, eps=1e-3, normalization="RMSNorm", device="cpu"),
        lambda: octavo.LayerNormLinear(H, F, eps=1e-3, normalization="RMSNorm"),
    ),
    "layernorm_mlp": (
        lambda: te.LayerNormMLP(H, F, activation="swiglu", zero_centered_gamma=True, device="cpu"),
        lambda: octavo.LayerNormMLP(H, F, activation="swiglu", zero_centered_gamma=True),
    ),
    "attention": (
        lambda: te.MultiheadAttention(H, N, num_gqa_groups=2, attention_dropout=0.0, device="cpu"),
        lambda: octavo.MultiheadAttention(H, N, num_gqa_groups=2),
    ),
    "encoder": (
        lambda: transformer_layer(fuse_qkv_params=True, qk_norm_type="L2Normalization", attn_input_format="bshd"),
        lambda: octavo.TransformerLayer(
            H, F, N, fuse_qkv_params=True, qk_norm_type="L2Normalization", attn_input_format="bshd"
        ),
    ),
    "post_norm": (
        lambda: transformer_layer(apply_residual_connection_post_layernorm=True, output_layernorm=True, bias=False),
        lambda: octavo.TransformerLayer(
            H, F, N, apply_residual_connection_post_layernorm=True, output_layernorm=True, bias=False
        ),
    ),
    "parallel": (
        lambda: transformer_layer(parallel_attention_mlp=True, self_attn_mask_type="no_mask", window_size=(2, 2)),
        lambda: octavo.TransformerLayer(
            H, F, N, parallel_attention_mlp=True, self_attn_mask_type="no_mask", window_size=(2, 2)
        ),
    ),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_layers_give_the_bits_of_octavos(kind: str) -> None:
    theirs, own = PAIRS[kind][0](), PAIRS[kind][1]()
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    for layer in (theirs, own):  # both are told that their weights are new: delayed scales come from them
        layer.load_state_dict(own.state_dict())
    x = torch.randn(6, 2, H)
    for recipe in (Float8CurrentScaling(), DelayedScaling(amax_history_len=4)):
        outs = []
        for layer in (theirs, own):
            layer.zero_grad()
            y = in_fp8(lambda layer=layer: layer(x), recipe)
            y.square().sum().backward()
            outs.append(y)
        assert torch.equal(*outs)
        grads = dict(own.named_parameters())
        for name, parameter in theirs.named_parameters():
            assert torch.equal(parameter.grad, grads[name].grad), name


def test_a_decoder_attends_to_the_encoders_output_with_its_own_mask() -> None:
    layer = transformer_layer(layer_type="decoder", enc_dec_attn_mask_type="padding")
    own = octavo.TransformerLayer(H, F, N, layer_type="decoder", enc_dec_attn_mask_type="padding")
    own.load_state_dict(layer.state_dict())
    x, encoded = torch.randn(5, 2, H), torch.randn(7, 2, H)
    none, tail = torch.zeros(2, 1, 1, 5, dtype=torch.bool), torch.arange(7).expand(2, 1, 1, 7) >= 4
    y = layer(x, encoder_output=encoded, enc_dec_attn_mask=(none, tail))
    assert torch.equal(y, own(x, encoder_output=encoded, enc_dec_call={"attention_mask": (none, tail)}))
    encoded[4:] = 100.0
    assert torch.equal(y, layer(x, encoder_output=encoded, enc_dec_attn_mask=(none, tail)))


def test_grouped_linear_gives_the_bits_of_octavos_and_hands_biases_out() -> None:
    theirs, own = te.GroupedLinear(3, H, F, device="cpu"), octavo.GroupedLinear(3, H, F)
    assert list(theirs.state_dict()) == list(own.state_dict())
    assert not theirs.bias0.any()
    theirs.load_state_dict(own.state_dict())
    x, splits = torch.randn(12, H), [5, 0, 7]
    assert torch.equal(in_fp8(lambda: theirs(x, splits)), in_fp8(lambda: own(x, splits)))
    apart = te.GroupedLinear(3, H, F, return_bias=True, device="cpu")
    apart.load_state_dict(own.state_dict())
    y, biases = apart(x, splits)
    # Of the same products: the bias is added once they are rounded to float32, or within them.
    torch.testing.assert_close(y[:5] + biases[0], own(x, splits)[:5])
    assert len(biases) == 3
    assert torch.equal(biases[2], own.bias2)


def test_padding_fills_up_and_takes_out() -> None:
    x = torch.randn(9, H)
    padded, sizes = te.Fp8Padding(2)(x, [3, 6])
    assert sizes == [16, 16]
    assert not padded[3:16].any()
    assert torch.equal(te.Fp8Unpadding(2)(padded, [3, 6]), x)
    assert te.Fp8Padding(2, 32)(x, [3, 6])[1] == [32, 32]


@pytest.mark.parametrize("made", [te.LayerNormLinear, te.LayerNormMLP])
def test_bias_and_normalised_input_are_handed_out(made: Any) -> None:
    x = torch.randn(4, H)
    plain = made(H, F, device="cpu")
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if "bias" in name:
                parameter.normal_()
    layer = made(H, F, return_bias=True, return_layernorm_output=True, device="cpu")
    layer.load_state_dict(plain.state_dict())
    y, bias, normed = layer(x)
    assert torch.equal(bias, plain.bias if made is te.LayerNormLinear else plain.fc2_bias)
    torch.testing.assert_close(y + bias, plain(x))
    expected = nn.functional.layer_norm(x, (H,), plain.layer_norm_weight, plain.layer_norm_bias)
    torch.testing.assert_close(normed, expected)
    assert len(made(H, F, return_bias=True, device="cpu")(x)) == 2
    assert len(made(H, F, return_layernorm_output=True, device="cpu")(x)) == 2


def test_attention_hands_out_its_bias_and_its_normalised_input() -> None:
    options: dict[str, Any] = {"attention_dropout": 0.0, "input_layernorm": True, "device": "cpu"}
    plain = te.MultiheadAttention(H, N, **options)
    layer = te.MultiheadAttention(H, N, return_bias=True, return_layernorm_output=True, **options)
    nn.init.normal_(plain.proj.bias)
    layer.load_state_dict(plain.state_dict())
    x = torch.randn(5, 2, H)
    y, bias, normed = layer(x)
    torch.testing.assert_close(y + bias, plain(x))
    torch.testing.assert_close(normed, nn.functional.layer_norm(x, (H,)))


@pytest.mark.parametrize(
    "made",
    [
        lambda **fused: te.LayerNormLinear(H, F, device="cpu", **fused),
        lambda **fused: te.LayerNormMLP(H, F, device="cpu", **fused),
        lambda **fused: te.GroupedLinear(2, H, F, device="cpu", **fused),
        lambda **fused: transformer_layer(fuse_qkv_params=True, **fused),
    ],
    ids=["layernorm_linear", "layernorm_mlp", "grouped_linear", "transformer_layer"],
)
def test_gradients_of_weights_go_to_main_grad(made: Callable[..., nn.Module]) -> None:
    usual, fused = made(), made(fuse_wgrad_accumulation=True)
    fused.load_state_dict(usual.state_dict())
    for parameter in fused.parameters():
        if parameter.dim() == 2:
            parameter.main_grad = torch.ones_like(parameter)
    x = torch.randn(6, 2, H)
    arguments = ([5, 7],) if isinstance(usual, te.GroupedLinear) else ()
    for layer in (usual, fused):
        in_fp8(lambda layer=layer: layer(x, *arguments)).sum().backward()
    for (name, one), other in zip(usual.named_parameters(), fused.parameters(), strict=True):
        if one.dim() == 2:
            assert other.grad is None, name
            assert torch.equal(other.main_grad, 1 + one.grad), name
        else:
            assert torch.equal(other.grad, one.grad), name


@pytest.mark.parametrize(
    ("made", "weight"),
    [
        (lambda: te.LayerNormLinear(H, F, device="cpu"), "weight"),
        (lambda: te.LayerNormMLP(H, F, device="cpu"), "fc2_weight"),
        (lambda: te.GroupedLinear(2, H, F, device="cpu"), "weight1"),
        (lambda: transformer_layer(), "layernorm_mlp.fc1_weight"),
        (lambda: transformer_layer(), "self_attention.layernorm_qkv.key_weight"),
    ],
    ids=["layernorm_linear", "layernorm_mlp", "grouped_linear", "layer_mlp", "layer_key"],
)
def test_codes_of_weights_are_kept_between_micro_batches(made: Callable[[], nn.Module], weight: str) -> None:
    layer, x = made(), torch.randn(6, 2, H)
    arguments = ([5, 7],) if isinstance(layer, te.GroupedLinear) else ()

    def run(first: bool | None) -> Tensor:
        out: Tensor = in_fp8(lambda: layer(x, *arguments, is_first_microbatch=first))
        return out.detach()

    y = run(True)
    # What is written into .data goes unnoticed, so this tells kept codes from new ones.
    layer.get_parameter(weight).data.mul_(-3.0)
    assert torch.equal(run(False), y)
    assert not torch.equal(run(None), y)
    assert not torch.equal(run(True), y)
    with pytest.raises(ValueError, match="is_first_microbatch is 3"):
        run(3)  # type: ignore[arg-type]


def test_fp8_meta_of_an_mlp_has_the_columns_of_both_products() -> None:
    layer, x = te.LayerNormMLP(H, F, device="cpu"), torch.randn(6, H)
    in_fp8(lambda: layer(x), DelayedScaling(amax_history_len=4)).sum().backward()
    forward, backward = layer.fp8_meta["scaling_fwd"], layer.fp8_meta["scaling_bwd"]
    assert forward.amax_history.shape == (4, 6)
    assert backward.amax_history.shape == (4, 4)
    weights = layer.fc1_weight, layer.fc2_weight
    assert [forward.amax_history[-1, column].item() for column in (1, 4)] == [w.abs().max().item() for w in weights]


def test_fp8_meta_of_experts_has_the_columns_of_each_in_turn() -> None:
    layer, x = te.GroupedLinear(3, H, F, device="cpu"), torch.randn(10, H)
    assert layer.fp8_meta["recipe"] is None
    assert layer.fp8_meta["scaling_fwd"].amax_history.shape == (1, 9)
    recipe = DelayedScaling(amax_history_len=4)
    in_fp8(lambda: layer(x, [3, 0, 7]), recipe).sum().backward()
    meta = layer.fp8_meta
    forward, backward = meta["scaling_fwd"], meta["scaling_bwd"]
    assert (meta["recipe"], meta["num_gemms"]) == (recipe, 3)
    assert forward.amax_history.shape == (4, 9)
    assert backward.amax_history.shape == (4, 6)
    # An expert without tokens has cast its weight alone.
    amaxes = [[x[:3], layer.weight0], [None, layer.weight1], [x[3:], layer.weight2]]
    newest = [0.0 if t is None else t.abs().max().item() for pair in amaxes for t in (*pair, None)]
    assert forward.amax_history[-1].tolist() == newest
    # TE's scale is the multiplier; of what has no amax yet, and of outputs, it is 1.
    expected = [448 / amax if amax else 1.0 for amax in newest]
    torch.testing.assert_close(forward.scale, torch.tensor(expected), rtol=2.0**-22, atol=0)
    torch.testing.assert_close(forward.scale_inv, 1 / torch.tensor(expected), rtol=2.0**-22, atol=0)
    # The gradient of a sum is ones, and the view shows it as the pending update will leave it.
    assert backward.amax_history[-1].tolist() == [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    assert backward.scale.tolist() == pytest.approx([57344.0, 1.0, 1.0, 1.0, 57344.0, 1.0], rel=2.0**-22)


def test_fp8_meta_of_experts_of_different_recipes_is_as_long_as_the_longest() -> None:
    layer = te.GroupedLinear(2, H, F, device="cpu")
    layer.layer_name = "moe"
    recipe = octavo.recipes.DelayedScaling(amax_history_len=4, overrides={"expert1": None})
    with octavo.autocast(recipe=recipe):
        layer(torch.randn(6, H), [3, 3])
    history = layer.fp8_meta["scaling_fwd"].amax_history
    assert history.shape == (4, 6)
    assert history[-1, :2].all()
    assert not history[:, 2:].any()


@pytest.mark.parametrize("attention_type", ["self", "cross"])
def test_fp8_meta_of_attention_is_that_of_its_projections_and_of_what_is_not_quantized(attention_type: str) -> None:
    layer = te.MultiheadAttention(H, N, attention_type=attention_type, input_layernorm=True, device="cpu")
    x, recipe = torch.randn(5, 2, H), DelayedScaling(amax_history_len=4)
    other = {"encoder_output": 3 * x} if attention_type == "cross" else {}
    in_fp8(lambda: layer(x, **other), recipe).sum().backward()
    first = layer.layernorm_qkv if attention_type == "self" else layer.layernorm_query
    weights = {first: first.weight, layer.proj: layer.proj.weight}
    if attention_type == "cross":
        weights[layer.key_value] = layer.key_value.weight
        assert layer.key_value.fp8_meta["scaling_fwd"].amax_history[-1, 0] == 3 * x.abs().max()
    for projection, weight in weights.items():
        forward = projection.fp8_meta["scaling_fwd"]
        assert forward.amax_history.shape == (4, 3)
        assert forward.amax_history[-1, 1] == weight.abs().max()
        assert forward.amax_history[-1, 0] > 0
    core = layer.core_attention.fp8_meta
    assert (core["recipe"], core["num_gemms"]) == (recipe, 3)
    for direction, operands in (("scaling_fwd", 9), ("scaling_bwd", 6)):
        assert torch.equal(core[direction].amax_history, torch.zeros(4, operands))
        assert torch.equal(core[direction].scale, torch.ones(operands))
        assert torch.equal(core[direction].scale_inv, torch.ones(operands))


def test_state_of_transformer_engine_loads() -> None:
    """A state dict as TE saves it: the parameters, and a pickle in a tensor for each of its modules."""
    layer = transformer_layer(output_layernorm=True)
    state = layer.state_dict()
    extra = [f"{ATTENTION}.{part}" for part in ("qkv", "proj", "core_attention", "core_attention.fused_attention")]
    for name in (*extra, "layernorm_mlp", "layernorm"):
        state[f"{name}._extra_state"] = torch.zeros(8, dtype=torch.uint8)
    transformer_layer(output_layernorm=True).load_state_dict(state)
    grouped = te.GroupedLinear(2, H, F, device="cpu")
    grouped.load_state_dict({**grouped.state_dict(), "_extra_state": torch.zeros(8, dtype=torch.uint8)})


def test_layers_made_in_fp8_hold_codes_of_weights_drawn_as_usual() -> None:
    with te.fp8_model_init(enabled=True, recipe=Float8CurrentScaling()):
        mlp, grouped = te.LayerNormMLP(H, F, device="cpu"), te.GroupedLinear(2, H, F, device="cpu")
        layer = transformer_layer(fuse_qkv_params=True)
    weights = [
        mlp.fc1_weight,
        grouped.weight1,
        layer.self_attention.layernorm_qkv.weight,
        layer.layernorm_mlp.fc2_weight,
    ]
    for weight in weights:
        assert isinstance(weight, octavo.QuantizedTensor)
        # 2048 draws and more: 1 / sqrt(2 * 2048), five of those; the rounding adds 1 / 1000.
        assert weight.dequantize().std().item() == pytest.approx(0.023, rel=5 / math.sqrt(4096))
    with te.fp8_model_init(), pytest.raises(NotImplementedError, match="parameters_split"):
        transformer_layer()


class OneOfTwo:
    """A process group of two ranks."""

    def size(self) -> int:
        return 2


RANKS: list[Callable[..., Any]] = [
    lambda **ranks: te.LayerNormLinear(H, F, device="cpu", **ranks),
    lambda **ranks: te.LayerNormMLP(H, F, device="cpu", **ranks),
    lambda **ranks: te.GroupedLinear(2, H, F, device="cpu", **ranks),
    lambda **ranks: te.DotProductAttention(N, 8, **ranks),
    lambda **ranks: te.MultiheadAttention(H, N, device="cpu", **ranks),
    transformer_layer,
]


@pytest.mark.parametrize("made", RANKS)
def test_several_ranks_are_refused_by_name_and_one_rank_changes_nothing(made: Callable[..., Any]) -> None:
    layer = made(sequence_parallel=True, tp_size=1)
    named = f"te.{type(layer).__name__}.*tensor-parallel group of 2"
    for ranks in ({"tp_size": 2}, {"tp_group": OneOfTwo()}):
        with pytest.raises(NotImplementedError, match=named):
            made(**ranks)


def test_what_is_not_built_is_refused_by_its_name() -> None:
    refused: list[tuple[str, Callable[[], Any]]] = [
        ("cp_group", lambda: te.DotProductAttention(N, 8, cp_group=OneOfTwo())),
        ("cp_group", lambda: transformer_layer().set_context_parallel_group(OneOfTwo(), [0, 1], None)),
        ("tensor-parallel", lambda: transformer_layer().set_tensor_parallel_group(OneOfTwo())),
        ("softmax_type='learnable'", lambda: te.MultiheadAttention(H, N, softmax_type="learnable", device="cpu")),
        ("ub_tp_comm_overlap", lambda: transformer_layer(ub_tp_comm_overlap=True)),
        ("activation_params", lambda: te.LayerNormMLP(H, F, activation_params={"limit": 7.0}, device="cpu")),
        ("fp8_output", lambda: te.LayerNormLinear(H, F, device="cpu")(torch.randn(2, H), fp8_output=True)),
        ("pad_between_seqs", lambda: transformer_layer()(torch.randn(2, 1, H), pad_between_seqs=True)),
        ("qkv_format='thd'", lambda: te.InferenceParams(1, 8, qkv_format="thd")),
    ]
    for name, act in refused:
        with pytest.raises(NotImplementedError, match=name):
            act()


def test_masks_that_a_type_does_not_look_at_are_left_alone() -> None:
    q = torch.randn(5, 2, N, 8)
    layer = te.DotProductAttention(N, 8)
    mask = torch.zeros(2, 1, 1, 5, dtype=torch.bool)
    mask[0, :, :, 3:] = True
    assert torch.equal(layer(q, q, q, mask), layer(q, q, q))
    padded = layer(q, q, q, mask, attn_mask_type="padding,causal")
    assert not torch.equal(padded, layer(q, q, q))
    assert torch.equal(
        padded, octavo.DotProductAttention(N, 8, attn_mask_type="padding_causal")(q, q, q, attention_mask=mask)
    )


@pytest.mark.parametrize("paged", [{}, {"is_paged": True, "total_num_pages": 8, "page_size": 4}])
def test_generation_with_inference_params_gives_the_uncached_forward(paged: dict[str, Any]) -> None:
    layer, angles = transformer_layer(attn_input_format="bshd").eval(), te.RotaryPositionEmbedding(8)(16, device="cpu")
    x = torch.randn(2, 7, H)
    params = te.InferenceParams(2, 16, N, 8, torch.float32, **paged)
    with torch.no_grad():
        whole = layer(x, rotary_pos_emb=angles)
        made = []
        for start, stop in ((0, 4), (4, 5), (5, 7)):
            params.pre_step(OrderedDict({"a": stop - start, "b": stop - start}))
            made.append(layer(x[:, start:stop], inference_params=params, rotary_pos_emb=angles))
    # Sums of the same float32 products in another order.
    torch.testing.assert_close(torch.cat(made, 1), whole, atol=1e-5, rtol=1e-5)
    assert list(params.sequences.values()) == [7, 7]
    with pytest.raises(NotImplementedError, match="other sequences"):
        params.pre_step({"c": 1})
    params.reset()
    params.pre_step({"c": 7})
    with torch.no_grad():
        assert torch.equal(
            layer(x[:1], inference_params=params, rotary_pos_emb=angles), layer(x[:1], rotary_pos_emb=angles)
        )


def test_rotary_embeddings_turn_by_the_place_of_a_token() -> None:
    angles = te.RotaryPositionEmbedding(8, seq_len_interpolation_factor=2)(12, device="cpu")
    torch.testing.assert_close(angles[6, 0, 0, 0].item(), 3.0)  # the fastest pair: a radian a place
    x = torch.randn(2, 3, N, 8)
    y = te.attention.apply_rotary_pos_emb(x, angles, "bshd", start_positions=torch.tensor([0, 5]))
    expected = te.attention.apply_rotary_pos_emb(torch.cat((torch.zeros(1, 5, N, 8), x[1:]), 1), angles, "bshd")[:, 5:]
    assert torch.equal(y[1:], expected)
    assert torch.equal(y[:1], octavo.functional.rotary.apply_rotary(x[:1], angles[:3].transpose(0, 1)))


def test_norms_take_both_names_of_an_argument_but_not_at_once() -> None:
    assert te.LayerNorm(hidden_size=H, device="cpu", dtype=torch.half).weight.dtype is torch.half
    with pytest.raises(ValueError, match="normalized_shape"):
        te.LayerNorm(device="cpu")
    with pytest.raises(ValueError, match="params_dtype"):
        te.RMSNorm(H, params_dtype=torch.half, dtype=torch.half, device="cpu")


def test_a_transformer_layer_compiles_in_one_graph() -> None:
    layer, x = transformer_layer(), torch.randn(6, 2, H)
    recipe = Float8CurrentScaling()
    eager = in_fp8(lambda: layer(x), recipe)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(in_fp8(lambda: compiled(x), recipe), eager)
