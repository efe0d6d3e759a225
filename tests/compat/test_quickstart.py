"""quickstart_utils: the parts that Transformer Engine's tutorials import."""

from __future__ import annotations

import pytest
import torch
from octavo.compat.transformer_engine.common.recipe import DelayedScaling
from torch import nn

import octavo.compat.transformer_engine.pytorch as te
from octavo.compat import quickstart_utils as tools


@pytest.mark.parametrize(("name", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_representable_values_survive_the_cast(name: str, dtype: torch.dtype, scale: float) -> None:
    x = torch.randn(64, 64)
    y = tools.cast_to_representable(x, scale=scale, fp8_format=name)
    assert torch.equal((y * scale).to(dtype).float() / scale, y)
    assert not torch.equal(x, y)
    with pytest.raises(ValueError, match="e4m3"):
        tools.cast_to_representable(x, fp8_format="e3m4")


def test_attention_is_attention() -> None:
    q, k, v = (torch.randn(10, 2, 4, 16) for _ in range(3))  # [S, B, n, d]
    mask = torch.ones(10, 10, dtype=torch.bool).triu(1)
    out = tools.DotProductAttention(4, 16, 0.0)(q, k, v, mask)
    exact = nn.functional.scaled_dot_product_attention(
        *(t.double().permute(1, 2, 0, 3) for t in (q, k, v)), is_causal=True
    )
    expected = exact.permute(2, 0, 1, 3).reshape(10, 2, 64)
    # Sums of up to 16 and 10 float32 terms of order one, and an exponential: a few hundred roundings of 2^-24.
    assert torch.allclose(out.double(), expected, rtol=0, atol=256 * 2.0**-24)


def test_mlp_shares_its_parameters_with_a_model_of_te_linears() -> None:
    def layer(linear: type) -> nn.Module:
        arguments = {"device": "cpu"} if linear is te.Linear else {}
        made = nn.Module()
        made.ln1, made.ln2 = nn.LayerNorm(16), nn.LayerNorm(16)
        made.qkv_projection, made.projection = linear(16, 48, **arguments), linear(16, 16, **arguments)
        made.mlp = tools.BasicMLP(16, 32)
        if linear is te.Linear:
            made.mlp.linear1, made.mlp.linear2 = linear(16, 32, **arguments), linear(32, 16, **arguments)
        return made

    basic, ours = layer(nn.Linear), layer(te.Linear)
    tools.share_parameters_with_basic_te_model(ours, basic)
    for name, parameter in basic.named_parameters():
        assert ours.get_parameter(name) is parameter
    x = torch.randn(4, 16)
    assert torch.equal(ours.mlp(x), basic.mlp(x))


def test_parameters_reach_the_names_of_fused_layers() -> None:
    def names(paths: list[str]) -> nn.Module:
        root = nn.Module()
        for path in paths:
            owner = root
            *parents, last = path.split(".")
            for parent in parents:
                if parent not in owner._modules:
                    owner.add_module(parent, nn.Module())
                owner = owner.get_submodule(parent)
            owner.register_parameter(last, nn.Parameter(torch.zeros(1)))
        return root

    kinds = ("weight", "bias")
    basic = names(
        [
            f"{p}.{k}"
            for p in ("ln1", "ln2", "qkv_projection", "projection", "mlp.linear1", "mlp.linear2")
            for k in kinds
        ]
    )
    qkv, mlp = ("layer_norm_", ""), ("layer_norm_", "fc1_", "fc2_")
    for share, a, b, c in (
        (tools.share_parameters_with_fused_te_model, "ln_qkv", "projection", "ln_mlp"),
        (
            tools.share_parameters_with_transformerlayer_te_model,
            "self_attention.layernorm_qkv",
            "self_attention.proj",
            "layernorm_mlp",
        ),
    ):
        paths = [f"{a}.{p}{k}" for p in qkv for k in kinds] + [f"{b}.{k}" for k in kinds]
        target = names(paths + [f"{c}.{p}{k}" for p in mlp for k in kinds])
        share(target, basic)
        assert {id(p) for p in target.parameters()} == {id(p) for p in basic.parameters()}
        assert target.get_parameter(f"{c}.fc2_bias") is basic.mlp.linear2.bias


def test_the_stopwatch_runs_forward_and_backward_and_prints(capsys: pytest.CaptureFixture[str]) -> None:
    layer, x = te.Linear(32, 16, device="cpu"), torch.randn(4, 32)
    arguments = {"enabled": True, "fp8_recipe": DelayedScaling(amax_history_len=4)}
    tools.speedometer(layer, x, torch.ones(4, 16), fp8_autocast_kwargs=arguments, timing_iters=2, warmup_iters=1)
    out = capsys.readouterr().out
    assert float(out.removeprefix("Mean time: ").removesuffix(" ms\n")) > 0
    assert torch.equal(layer.bias.grad, torch.full((16,), 12.0))  # three backwards of four ones
    assert torch.count_nonzero(layer.fp8_meta["scaling_fwd"].amax_history[:, 0]) == 3


class BasicLayer(nn.Module):
    """The tutorial's transformer layer in plain PyTorch: queries, keys and values of a head side by side."""

    def __init__(self, hidden: int, inner: int, heads: int) -> None:
        super().__init__()
        self.heads, self.channels = heads, hidden // heads
        self.ln1, self.ln2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv_projection, self.projection = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.attention = tools.DotProductAttention(heads, self.channels, 0.0)
        self.mlp = tools.BasicMLP(hidden, inner)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv_projection(self.ln1(x)).unflatten(-1, (self.heads, -1)).split(self.channels, -1)
        x = x + self.projection(self.attention(q, k, v, mask))
        out: torch.Tensor = x + self.mlp(self.ln2(x))
        return out


def test_the_tutorials_layer_and_transformer_engines_compute_alike() -> None:
    basic = BasicLayer(32, 64, 4)
    layer = te.TransformerLayer(
        32, 64, 4, hidden_dropout=0.0, attention_dropout=0.0, fuse_qkv_params=True, device="cpu"
    )
    tools.share_parameters_with_transformerlayer_te_model(layer, basic)
    x, mask = torch.randn(6, 2, 32), torch.ones(6, 6, dtype=torch.bool).triu(1)
    # Sums of up to 64 float32 terms of order one, a few in a row: some hundred roundings of 2^-24.
    torch.testing.assert_close(layer(x), basic(x, mask), rtol=0, atol=512 * 2.0**-24)
