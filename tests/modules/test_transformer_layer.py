"""octavo.TransformerLayer against float64 steps, with every recipe, compiled, checkpointed, and in training."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.measures import relative_error, sqnr_db
from tests.modules.attention_reference import (
    allowed_pairs,
    attention_steps,
    chained,
    layer_steps,
    leaves,
    mlp_steps,
    normed,
    self_attention_steps,
)
from torch import Tensor, nn

import octavo
from octavo.recipes import BlockScaling, CurrentScaling, DelayedScaling, Recipe, RowwiseScaling, StaticScaling
from octavo.runtime import cached_weights

HIDDEN, FFN, HEADS, GROUPS = 64, 128, 4, 2
# SQNR in decibels, emulated, of: what the layer adds to its input; what it adds to the gradient; the gradients of
# query_weight, proj.weight, fc1_weight and fc2_weight. The table of docs/layers/transformer_layer.md.
RECIPES: dict[str, tuple[Recipe, tuple[float, ...]]] = {
    "delayed": (DelayedScaling(initialise_from_first_batch=True), (26.2, 21.4, 20.2, 22.3, 21.4, 23.1)),
    "current": (CurrentScaling(), (26.2, 21.4, 20.2, 22.3, 21.4, 23.1)),
    "current E4M3": (CurrentScaling(format=octavo.E4M3), (26.2, 24.9, 22.4, 25.0, 24.9, 25.4)),
    "rowwise": (RowwiseScaling(), (26.2, 25.2, 22.9, 25.2, 24.8, 25.6)),
    "block": (BlockScaling(), (26.2, 25.2, 22.9, 25.2, 24.8, 25.6)),
}
WEIGHTS = (
    "self_attention.layernorm_qkv.query_weight",
    "self_attention.proj.weight",
    "layernorm_mlp.fc1_weight",
    "layernorm_mlp.fc2_weight",
)
STATIC = StaticScaling(input_scale=0.02, weight_scale=0.002, grad_output_scale=0.01)


def layer_of(**options: Any) -> octavo.TransformerLayer:
    return octavo.TransformerLayer(HIDDEN, FFN, HEADS, GROUPS, **options)


def run(layer: nn.Module, x: Tensor, dy: Tensor, **call: Any) -> list[Tensor]:
    """y, dx, and the gradient of each parameter."""
    x = x.detach().requires_grad_()
    layer.zero_grad()
    y = layer(x, **call)
    y.backward(dy)
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]  # type: ignore[list-item]


def exact(layer: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    """The same in float64, by the steps."""
    state, x64 = leaves(layer), x.detach().double().requires_grad_()
    y = layer_steps(x64, state, (HEADS, GROUPS), allowed_pairs("causal", None, (x.shape[1], x.shape[0], x.shape[0])))
    y.backward(dy.double())
    return [y.detach(), x64.grad, *(p.grad for p in state.values())]  # type: ignore[list-item]


def data(tokens: int = 12, batch: int = 3) -> tuple[Tensor, Tensor]:
    return torch.randn(tokens, batch, HIDDEN), torch.randn(tokens, batch, HIDDEN)


def test_high_precision_is_the_steps() -> None:
    layer, (x, dy) = layer_of(), data()
    names = ["y", "dx", *(name for name, _ in layer.named_parameters())]
    for name, value, reference in zip(names, run(layer, x, dy), exact(layer, x, dy), strict=True):
        if name.endswith("key_bias"):
            # What all keys of a query have in common moves no probability: the gradient is 0, and here its rounding.
            assert value.abs().max() < 1e-5
            continue
        # Ten products one after the other, the longest of FFN terms.
        assert relative_error(reference, value) < chained(FFN, 10), name


@pytest.mark.parametrize("name", RECIPES)
def test_fp8_is_near_the_steps(name: str) -> None:
    recipe, expected = RECIPES[name]
    torch.manual_seed(0)
    layer, (x, dy) = layer_of(), data(64, 8)
    with octavo.autocast(recipe=recipe):
        values = run(layer, x, dy)
    references = exact(layer, x, dy)
    weights = [2 + index for index, (n, _) in enumerate(layer.named_parameters()) if n in WEIGHTS]
    # The residual is exact, and not counted.
    measured = [sqnr_db(references[0] - x, values[0] - x), sqnr_db(references[1] - dy, values[1] - dy)]
    measured += [sqnr_db(references[index], values[index]) for index in weights]
    assert measured == pytest.approx(expected, abs=0.5)


@pytest.mark.parametrize("recipe", [None, *(entry[0] for entry in RECIPES.values())], ids=lambda r: type(r).__name__)
def test_twenty_steps_of_training_follow_those_in_high_precision(recipe: Recipe | None) -> None:
    model = nn.Sequential(layer_of(), layer_of(fuse_qkv_params=True))
    plain = copy.deepcopy(model)
    x, target = torch.randn(16, 4, HIDDEN), torch.randn(16, 4, HIDDEN)
    losses: list[list[float]] = [[], []]
    for history, trained, enabled in ((losses[0], model, recipe is not None), (losses[1], plain, False)):
        optimizer = torch.optim.AdamW(trained.parameters(), lr=2e-3)
        for _ in range(20):
            optimizer.zero_grad()
            with octavo.autocast(enabled=enabled, recipe=recipe):
                y = trained(x)
            loss = (y - target).square().mean()
            loss.backward()
            optimizer.step()
            history.append(loss.item())
    # Random targets are learnt by heart: the loss falls from 2 by a third in 20 steps.
    assert losses[1][-1] < 0.75 * losses[1][0]
    # E4M3 and E5M2 lose 2.5 and 5 % of a value; of a loss, in which errors of random sign average out, far less.
    assert losses[0][-1] == pytest.approx(losses[1][-1], rel=0.02)
    assert (losses[0] == losses[1]) == (recipe is None)


# Every recipe once, both forms of q, k, v by turns: each combination costs seconds.
@pytest.mark.parametrize(
    ("recipe", "fused"),
    [
        (recipe, place % 2 == 1)
        for place, recipe in enumerate([None, STATIC, *(entry[0] for entry in RECIPES.values())])
    ],
)
def test_compiled_without_a_break_it_gives_the_same_bits(recipe: Recipe | None, fused: bool) -> None:
    torch._dynamo.reset()
    layer, (x, dy) = layer_of(fuse_qkv_params=fused), data()
    copied = copy.deepcopy(layer)
    compiled = torch.compile(copied, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        outcomes = []
        for each in (layer, compiled):
            leaf = x.clone().requires_grad_()
            with octavo.autocast(enabled=recipe is not None, recipe=recipe):
                y = each(leaf)
            y.backward(dy)
            outcomes.append((y, leaf.grad))
        assert torch.equal(outcomes[0][0], outcomes[1][0])
        assert torch.equal(outcomes[0][1], outcomes[1][1])
    for (name, own), (_, other) in zip(layer.named_parameters(), copied.named_parameters(), strict=True):
        assert torch.equal(own.grad, other.grad), name


@pytest.mark.parametrize("recipe", [STATIC, *(entry[0] for entry in RECIPES.values())])
def test_checkpointing_is_invisible(recipe: Recipe) -> None:
    layer = layer_of(attention_dropout=0.1, hidden_dropout=0.1, drop_path_rate=0.2)
    copied = copy.deepcopy(layer)
    for step in range(3):
        x, dy = data()
        outcomes = []
        for each, function in ((layer, layer), (copied, lambda x: octavo.checkpoint(copied, x))):
            leaf = x.clone().requires_grad_()
            torch.manual_seed(step)
            with octavo.autocast(recipe=recipe):
                y = function(leaf)
            y.backward(dy)
            outcomes.append([y, leaf.grad, *(p.grad for p in each.parameters())])
        for plain, recomputed in zip(*outcomes, strict=True):
            assert torch.equal(plain, recomputed)
    for (name, own), (_, other) in zip(layer.state_dict().items(), copied.state_dict().items(), strict=True):
        assert torch.equal(own, other), name


def parts_of(layer: nn.Module) -> dict[str, dict[str, Tensor]]:
    """The state of each child, in float64."""
    state = {name: value.double() for name, value in layer.state_dict().items()}
    children = {name.rpartition(".")[0] for name in state}
    return {
        child: {n.removeprefix(f"{child}."): v for n, v in state.items() if n.rpartition(".")[0] == child}
        for child in children
    }


def attended(n: Tensor, parts: dict[str, dict[str, Tensor]], qkv: str) -> Tensor:
    own = {**parts[f"self_attention.{qkv}"]}
    own |= {f"proj.{name}": value for name, value in parts["self_attention.proj"].items()}
    allowed = allowed_pairs("causal", None, (n.shape[1], n.shape[0], n.shape[0]))
    return self_attention_steps(n, own, (HEADS, GROUPS), allowed=allowed)


def norm_of(x: Tensor, part: dict[str, Tensor], prefix: str = "layer_norm_") -> Tensor:
    return normed(x, part[f"{prefix}weight"], part[f"{prefix}bias"])


def randomise_norms(layer: nn.Module) -> None:
    """So that a norm that is left out, or stands elsewhere, makes a difference."""
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "norm_weight" in name or "norm_bias" in name or name.startswith("layernorm."):
                parameter.normal_(1.0, 0.5)


def test_post_norm_is_that_of_bert() -> None:
    layer = layer_of(output_layernorm=True, apply_residual_connection_post_layernorm=True)
    randomise_norms(layer)
    (x, _), parts = data(), parts_of(layer)
    # 1. h = norm(x + attention(x)), in which the MLP's own norm stands behind the attention.
    h = norm_of(x.double() + attended(x.double(), parts, "qkv"), parts["layernorm_mlp"])
    # 2. y = norm(h + mlp(h))
    y = norm_of(h + mlp_steps(h, parts["layernorm_mlp"]), parts["layernorm"], "")
    assert relative_error(y, layer(x)) < chained(FFN, 10)


def test_output_layernorm_alone_normalises_the_result_and_not_the_input() -> None:
    layer = layer_of(output_layernorm=True)
    randomise_norms(layer)
    (x, _), parts = data(), parts_of(layer)
    h = x.double() + attended(x.double(), parts, "qkv")
    y = h + mlp_steps(norm_of(h, parts["layernorm_mlp"]), parts["layernorm_mlp"])
    assert relative_error(norm_of(y, parts["layernorm"], ""), layer(x)) < chained(FFN, 10)


def test_the_residual_may_come_after_the_norm() -> None:
    layer = layer_of(apply_residual_connection_post_layernorm=True)
    randomise_norms(layer)
    (x, _), parts = data(), parts_of(layer)
    n = norm_of(x.double(), parts["self_attention.layernorm_qkv"])
    h = norm_of(n + attended(n, parts, "layernorm_qkv"), parts["layernorm_mlp"])
    assert relative_error(h + mlp_steps(h, parts["layernorm_mlp"]), layer(x)) < chained(FFN, 10)


def test_attention_and_mlp_side_by_side() -> None:
    layer = layer_of(parallel_attention_mlp=True)
    randomise_norms(layer)
    (x, _), parts = data(), parts_of(layer)
    a = attended(norm_of(x.double(), parts["self_attention.layernorm_qkv"]), parts, "layernorm_qkv")
    m = mlp_steps(norm_of(x.double(), parts["layernorm_mlp"]), parts["layernorm_mlp"])
    assert relative_error(x + a + m, layer(x)) < chained(FFN, 10)


@pytest.mark.parametrize("from_norm", [False, True])
def test_a_decoder_attends_to_the_encoders_output(from_norm: bool) -> None:
    layer = layer_of(layer_type="decoder", apply_residual_connection_post_layernorm=from_norm)
    randomise_norms(layer)
    (x, _), parts = data(), parts_of(layer)
    memory = torch.randn(7, 3, HIDDEN)
    gone = torch.rand(3, 1, 12, 7) < 0.3
    n = norm_of(x.double(), parts["self_attention.layernorm_qkv"])
    h = (n if from_norm else x) + attended(n, parts, "layernorm_qkv")
    query, key_value = parts["inter_attention.layernorm_query"], parts["inter_attention.key_value"]
    n = norm_of(h, query)
    heads = []
    for source, made, name, count in (
        (n, query, "query", HEADS),
        (memory.double(), key_value, "key", GROUPS),
        (memory.double(), key_value, "value", GROUPS),
    ):
        projected = source @ made[f"{name}_weight"].t() + made[f"{name}_bias"]
        heads.append(projected.unflatten(-1, (count, HIDDEN // HEADS)).permute(1, 2, 0, 3))
    out = attention_steps(*heads, ~gone)[0].permute(2, 0, 1, 3).flatten(-2)
    proj = parts["inter_attention.proj"]
    h = (n if from_norm else h) + out @ proj["weight"].t() + proj["bias"]
    n = norm_of(h, parts["layernorm_mlp"])
    exact = (n if from_norm else h) + mlp_steps(n, parts["layernorm_mlp"])
    y = layer(x, encoder_output=memory, enc_dec_call={"attn_mask_type": "arbitrary", "attention_mask": gone})
    assert relative_error(exact, y) < chained(FFN, 14)


@pytest.mark.parametrize("layout", ["sbhd", "bshd", "thd"])
def test_a_sample_that_goes_past_both_halves_stays_as_it_is(layout: str) -> None:
    layer = layer_of(drop_path_rate=0.7, attn_input_format=layout)
    x, call = torch.randn(5, 40, HIDDEN), {}
    if layout == "bshd":
        x = x.transpose(0, 1).contiguous()
    if layout == "thd":
        x, call = torch.randn(200, HIDDEN), {"cu_seqlens_q": torch.arange(0, 201, 5)}
    same = (layer(x, **call) == x).all(-1)
    by_sample = same if layout == "sbhd" else same.t() if layout == "bshd" else same.reshape(40, 5).t()
    # A sample as a whole, 0.49 of them; 40 draws, three standard deviations.
    assert torch.equal(by_sample.all(0), by_sample.any(0))
    assert abs(float(by_sample[0].float().mean()) - 0.49) < 3 * 0.5 / 40**0.5
    assert not (layer.eval()(x, **call) == x).all(-1).any()


def test_a_padded_batch_gives_the_bits_of_its_sequences_packed() -> None:
    lengths = [9, 3, 12]
    padded = layer_of(attn_input_format="bshd", self_attn_mask_type="padding_causal")
    packed = layer_of(attn_input_format="thd", self_attn_mask_type="padding_causal")
    packed.load_state_dict(padded.state_dict())
    x = torch.randn(3, 12, HIDDEN)
    mask = torch.arange(12) >= torch.tensor(lengths)[:, None]
    tokens, cu = x[~mask], torch.tensor([0, 9, 12, 24], dtype=torch.int32)
    # Scales of a token each: what lies in the padding has no part in those of others.
    with octavo.autocast(recipe=RowwiseScaling()):
        assert torch.equal(padded(x, attention_mask=mask)[~mask], packed(tokens, cu_seqlens_q=cu))


def test_a_model_compiled_layer_by_layer_is_one_graph() -> None:
    torch._dynamo.reset()
    compiled: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    model = nn.ModuleList(layer_of() for _ in range(4))
    for layer in model:
        layer.compile(fullgraph=True, backend=backend)
    x, _ = data()
    with torch.no_grad(), octavo.autocast(recipe=CurrentScaling()):
        for layer in model:
            x = layer(x)
    assert len(compiled) == 1


@pytest.mark.parametrize("options", [{}, {"window_size": (4, 0)}, {"qk_norm_type": "RMSNorm"}])
def test_lengths_share_a_graph(options: dict[str, Any]) -> None:
    """One graph for the first length, one for all others; angles are made in it."""
    torch._dynamo.reset()
    compiled: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    layer, rotary = layer_of(**options), octavo.RotaryPositionEmbedding(HIDDEN // HEADS)

    def forward(x: Tensor) -> Tensor:
        y: Tensor = layer(x, rotary_pos_emb=rotary(x.shape[0]))
        return y

    fast = torch.compile(forward, fullgraph=True, backend=backend)
    with torch.no_grad(), octavo.autocast(recipe=CurrentScaling()):
        for tokens in (12, 13, 20, 31, 7):
            x, _ = data(tokens)
            assert torch.equal(fast(x), forward(x))
    assert len(compiled) == 2


@pytest.mark.parametrize("recipe", [None, DelayedScaling(), *(entry[0] for entry in RECIPES.values())])
@pytest.mark.parametrize("shape", [(0, 2), (3, 0), (1, 1), (7, 1)])
def test_any_number_of_tokens(shape: tuple[int, int], recipe: Recipe | None) -> None:
    layer, x, dy = layer_of(), torch.randn(*shape, HIDDEN), torch.randn(*shape, HIDDEN)
    with octavo.autocast(enabled=recipe is not None, recipe=recipe):
        values = run(layer, x, dy)
    if x.numel():
        references = exact(layer, x, dy)
        # Few tokens average less; the errors of all recipes together are below a tenth.
        assert relative_error(references[0], values[0]) < 0.1
        assert relative_error(references[1], values[1]) < 0.1
        return
    assert values[0].shape == values[1].shape == x.shape
    for gradient in values[2:]:
        assert not gradient.any()


@pytest.mark.parametrize("kind", ["L2Normalization", "LayerNorm"])
def test_gradients_in_float64_are_those_of_finite_differences(kind: str) -> None:
    layer = layer_of(qk_norm_type=kind, rotary_pos_interleaved=True).double()
    angles = octavo.RotaryPositionEmbedding(HIDDEN // HEADS, interleaved=True)(3)
    x = torch.randn(3, 1, HIDDEN, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x: layer(x, rotary_pos_emb=angles), (x,), fast_mode=True)


def test_micro_batches_sum_their_gradients() -> None:
    layer, (x, dy) = layer_of(), data(batch=8)
    whole = run(layer, x, dy)[2:]
    layer.zero_grad()
    for part, gradient in zip(x.split(2, 1), dy.split(2, 1), strict=True):
        layer(part).backward(gradient)
    for one, (name, parameter) in zip(whole, layer.named_parameters(), strict=True):
        if not name.endswith("key_bias"):
            assert relative_error(one, parameter.grad) < chained(FFN, 10), name  # type: ignore[arg-type]


def test_its_mlp_smooths_as_it_is_told() -> None:
    assert layer_of(activation="swiglu", smooth_swiglu=True).layernorm_mlp.smooth_swiglu
    with pytest.raises(ValueError, match="smooths the channels of 'swiglu'"):
        layer_of(activation="gelu", smooth_swiglu=True)


def test_names_of_parameters_are_transformer_engines() -> None:
    layer = layer_of(layer_type="decoder", output_layernorm=True)
    assert {name.rpartition(".")[0] for name in layer.state_dict()} == {
        "self_attention.qkv",
        "self_attention.proj",
        "inter_attention.layernorm_query",
        "inter_attention.key_value",
        "inter_attention.proj",
        "layernorm_mlp",
        "layernorm",
    }


def test_delayed_state_saves_and_loads_with_the_layer() -> None:
    layer, (x, dy) = layer_of(), data()
    recipe = DelayedScaling(amax_history_len=4)
    for _ in range(3):
        with octavo.autocast(recipe=recipe):
            layer(x).backward(dy)
    state = layer.state_dict()
    for name in ("self_attention.layernorm_qkv.input_scale", "self_attention.proj.grad_output_scale"):
        assert state[name] != 1
    resumed = layer_of()
    resumed.load_state_dict(state)
    with octavo.autocast(recipe=recipe):
        assert torch.equal(layer(x), resumed(x))
    fresh = layer_of()
    fresh.load_state_dict(octavo.state_dict(layer, plain=True))


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"layer_type": "middle"}, {}, "layer_type is 'middle': expected 'encoder' or 'decoder'"),
    ({"layer_type": "decoder", "parallel_attention_mlp": True}, {}, "goes with 'encoder'"),
    (
        {"parallel_attention_mlp": True, "apply_residual_connection_post_layernorm": True},
        {},
        "choose one of the two options",
    ),
    ({"hidden_dropout": -0.1}, {}, "hidden_dropout is -0.1: it must be a probability"),
    ({"layer_type": "decoder"}, {}, "encoder_output is None: it belongs to a decoder"),
    ({}, {"encoder_output": torch.zeros(1)}, "encoder_output is given: it belongs to a decoder"),
]


@pytest.mark.parametrize(("options", "call", "sentence"), REFUSED)
def test_contradictions_are_refused(options: dict[str, Any], call: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        layer_of(**options)(data()[0], **call)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="dropout_of_hidden"):
        layer_of(dropout_of_hidden=0.1)


def test_weights_are_cast_once_within_cached_weights() -> None:
    layer, batches = layer_of(), [data()[0] for _ in range(3)]
    with octavo.autocast(recipe=CurrentScaling()):
        plain = [layer(x) for x in batches]
        with cached_weights():
            cached = [layer(x) for x in batches]
            qkv = layer.self_attention.layernorm_qkv
            assert qkv._weight_cache is not None
        assert qkv._weight_cache is None
    for one, other in zip(plain, cached, strict=True):
        assert torch.equal(one, other)
