"""Frozen models run known structures as one: which, with what bits, from which casts, and how they are kept."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.conversion.known_models import MODELS, Block, batch, llama, logits, with_octavos_parts
from torch import Tensor, nn

import octavo
from octavo.conversion.casting_norm import CastingNorm
from octavo.conversion.joined_mlp import JoinedMLP
from octavo.functional import fused_casts
from octavo.inference import FrozenLinear, calibrate, freeze
from octavo.tensor import quantizer

pytest.importorskip("transformers")
BF16 = torch.bfloat16
SCHEMES = ["tensor_static", "tensor_dynamic", "row"]
HEAD = "lm_head|classifier|predictions"


def frozen(model: nn.Module, scheme: str, like: nn.Module | None = None, **options: Any) -> nn.Module:
    """A frozen copy, in evaluation mode; static scales are those of the batch that the tests run, in `like`."""
    scales = calibrate(like or model, [batch(model)]) if scheme == "tensor_static" else None
    model = copy.deepcopy(model).eval()
    freeze(model, scheme, input_scales=scales, exclude=HEAD, **options)
    return model


@contextmanager
def counted_casts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """Shapes of the casts that are no part of a normalisation or of an activation."""
    shapes: list[tuple[int, ...]] = []
    with monkeypatch.context() as patched:
        for name in ("cast_transpose", "row_cast"):
            real = getattr(quantizer, name)

            def counting(x: Tensor, *arguments: Any, real: Any = real, **options: Any) -> Any:
                shapes.append(tuple(x.shape))
                return real(x, *arguments, **options)

            patched.setattr(quantizer, name, counting)
        yield shapes


@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_what_convert_fuses_is_fused_in_a_frozen_model(name: str, converted: bool) -> None:
    model = MODELS[name](1).eval()
    expected = {(one.name, one.parts) for one in octavo.convert(copy.deepcopy(model), exclude=HEAD).fused}
    keys = set(frozen(model, "row", fuse=False).state_dict())
    if converted:
        octavo.convert(model, exclude=HEAD)
    report = freeze(model, "row", exclude=HEAD)
    assert {(one.name, one.parts) for one in report.structures if one.fused} == {
        (name, parts) for name, parts in expected if parts != ("loss",)
    }
    assert "\nfused: " in str(report)
    assert set(model.state_dict()) == keys
    assert any(isinstance(module, JoinedMLP) for module in model.modules())


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "BERT", "ViT"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_bits_are_those_of_octavos_own_parts_called_one_by_one(name: str, scheme: str) -> None:
    """In float32, where nothing is rounded between a gate and its product."""
    model = MODELS[name](1).eval()
    separate = with_octavos_parts(copy.deepcopy(model))
    one, other = frozen(model, scheme), frozen(separate, scheme, model, fuse=False)
    for grad in (False, True):
        with torch.set_grad_enabled(grad), octavo.count_gemms() as mine:
            y = logits(one)
        with octavo.count_gemms() as theirs:
            assert torch.equal(y, logits(other))
        assert mine.by_layer() == theirs.by_layer()
    assert not torch.equal(y, logits(model))
    with torch.inference_mode():
        assert torch.equal(logits(one), y)


@pytest.mark.parametrize(("scheme", "casts"), [("tensor_static", 1), ("tensor_dynamic", 1), ("row", 1)])
@pytest.mark.parametrize("inference", [False, True])
def test_one_cast_a_block_is_left(scheme: str, casts: int, inference: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of attention's output: all other inputs are cast by the normalisation or the activation that makes them."""
    model = llama().eval()
    for fuse, expected in ((True, casts), (False, 4)):
        one = frozen(model, scheme, fuse=fuse)
        with counted_casts(monkeypatch) as shapes, torch.inference_mode(inference), torch.no_grad():
            logits(one)
        if fuse or not inference:  # whose tensors do not tell whether they were written to
            assert len(shapes) == expected


def test_layers_with_other_scales_cast_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama().eval()
    scales = calibrate(model, [batch(model)])
    scales["model.layers.0.self_attn.k_proj"] *= 2
    one, other = copy.deepcopy(model), with_octavos_parts(copy.deepcopy(model))
    freeze(one, "tensor_static", input_scales=scales, exclude=HEAD)
    freeze(other, "tensor_static", input_scales=scales, exclude=HEAD, fuse=False)
    with counted_casts(monkeypatch) as shapes, torch.no_grad():
        assert torch.equal(logits(one), logits(other))
    # k, v after it, and the output; in the other model q, gate and up together, and down besides.
    assert len(shapes) == 3 + 6


def test_a_scale_that_is_written_to_is_not_taken_for_its_neighbours() -> None:
    model, expected = frozen(llama(), "tensor_static"), frozen(llama(), "tensor_static", fuse=False)
    expected.load_state_dict(model.state_dict())
    attention: Any = model.model.layers[0].self_attn
    plan = attention.k_proj.plan(0)
    assert plan.input.origin() == attention.q_proj.plan(0).input.origin()
    attention.k_proj.input_scale.mul_(3)
    assert attention.k_proj.plan(0).input.origin() is None
    x, q, k = torch.randn(1, 5, 32), attention.q_proj, attention.k_proj
    with torch.no_grad():
        n = model.model.layers[0].input_layernorm(x)
        y, z = q(n), k(n)
        assert torch.equal(y, q(n.clone()))
        assert torch.equal(z, k(n.clone()))
    attention.k_proj.input_scale = attention.q_proj.input_scale.clone()
    assert attention.k_proj.plan(0).input.origin() is None


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_fused_and_on_their_own(copied: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = frozen(llama(), "tensor_static")
    other = copied(model)
    assert [type(module) for module in other.modules()] == [type(module) for module in model.modules()]
    with torch.no_grad(), counted_casts(monkeypatch) as shapes:
        assert torch.equal(logits(other), logits(model))
    assert len(shapes) == 2
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight.view(torch.uint8).zero_()
        assert not torch.equal(logits(other), logits(model))


@pytest.mark.parametrize("assign", [False, True])
def test_scales_of_a_file_are_known_as_those_of_a_calibration(
    assign: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = frozen(llama(), "tensor_static"), llama().eval()
    safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors")
    names = [name for name, module in model.named_modules() if isinstance(module, FrozenLinear)]
    freeze(other, "tensor_static", input_scales=dict.fromkeys(names, 1.0), exclude=HEAD)
    other.load_state_dict(safetensors.torch.load_file(tmp_path / "model.safetensors"), strict=True, assign=assign)
    with torch.no_grad(), counted_casts(monkeypatch) as shapes:
        assert torch.equal(logits(other), logits(model))
    assert len(shapes) == 2


def test_another_dtype_runs_as_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = frozen(llama(), "tensor_static").to(BF16)
    with torch.no_grad(), counted_casts(monkeypatch) as shapes:
        assert logits(model).dtype == BF16
    assert len(shapes) == 1


def test_under_autocast_an_mlp_casts_what_it_is_given() -> None:
    """As a layer by itself does: float32 is not rounded to the output's dtype first."""
    model = llama().eval()
    one, other = frozen(model, "row"), frozen(model, "row", fuse=False)
    x = torch.randn(2, 5, 32)
    with torch.no_grad(), torch.autocast("cpu", BF16):
        assert torch.equal(one.model.layers[0].mlp(x), other.model.layers[0].mlp(x))


def test_a_gradient_is_refused_by_an_mlp_as_by_a_layer() -> None:
    model: Any = frozen(llama(), "row")
    x = torch.randn(2, 5, 32, requires_grad=True)
    y = model.model.layers[0].mlp(x)
    with pytest.raises(RuntimeError, match="a frozen layer passes no gradient"):
        y.sum().backward()


def test_hooks_and_layers_that_are_left_keep_an_mlp_apart() -> None:
    model: Any = frozen(llama(), "row")
    x, seen = torch.randn(2, 5, 32), []
    mlp = model.model.layers[0].mlp
    y = mlp(x)
    mlp.up_proj.register_forward_hook(lambda *_: seen.append(1))
    mlp(x)
    assert seen == [1]
    part: Any = llama().eval()
    report = freeze(part, "row", exclude=[HEAD, "down_proj"])
    assert [one.reason for one in report.structures if one.kind == "LlamaMLP"] == ["down_proj stays in high precision"]
    octavo.convert(part, include="down_proj", filter="all")
    assert part.model.layers[0].mlp(x).shape == y.shape
    assert isinstance(part.model.layers[0].input_layernorm, CastingNorm)


def test_products_by_blocks_stay_apart() -> None:
    model = llama().eval()
    report = freeze(model, "mxfp8", exclude=HEAD)
    assert not any(one.fused for one in report.structures)
    assert "gate_proj computes its product by itself" in str(report)
    logits(model)


def test_a_later_conversion_leaves_frozen_structures_as_one() -> None:
    model: Any = llama(2).eval()
    freeze(model, "row", exclude=[HEAD, r"layers\.1"])
    expected = model.model.layers[0].mlp(x := torch.randn(2, 5, 32))
    octavo.convert(model, exclude=HEAD, filter="all")
    assert isinstance(model.model.layers[0].mlp, JoinedMLP)
    assert torch.equal(model.model.layers[0].mlp(x), expected)
    octavo.unconvert(model)
    assert not any(isinstance(module, (JoinedMLP, CastingNorm)) for module in model.modules())


def test_a_block_laid_out_as_timms(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Block().eval(), torch.randn(2, 9, 32)
    separate = with_octavos_parts(copy.deepcopy(model))
    freeze(model, "row")
    freeze(separate, "row", fuse=False)
    assert isinstance(model.mlp, JoinedMLP)
    with torch.no_grad():
        assert torch.equal(model(x), separate(x))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["Llama", "GPT-2"])
def test_a_frozen_mlp_compiles_in_one_graph(name: str, scheme: str) -> None:
    model: Any = frozen(MODELS[name](1), scheme)
    mlp = model.model.layers[0].mlp if name == "Llama" else model.transformer.h[0].mlp
    x = torch.randn(2, 9, 32)
    with torch.no_grad():
        expected = mlp(x)
        assert torch.equal(torch.compile(mlp, fullgraph=True, backend="aot_eager")(x), expected)


@pytest.mark.slow
# Every scheme, both models: each combination costs seconds.
@pytest.mark.parametrize(("name", "scheme"), [("Llama", "row"), ("ViT", "tensor_static"), ("Llama", "tensor_dynamic")])
def test_a_frozen_model_compiles_in_one_graph(name: str, scheme: str) -> None:
    """A normalisation is torch's there, with another last bit."""
    model = frozen(MODELS[name](2), scheme)
    options = {} if name == "ViT" else {"use_cache": False}
    with torch.no_grad():
        expected = model(**batch(model), **options).logits
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert torch.allclose(compiled(**batch(model), **options).logits, expected, rtol=0, atol=1e-4)


def test_fuse_takes_a_truth_value() -> None:
    with pytest.raises(ValueError, match="fuse is 'yes': it must be True or False"):
        freeze(llama(), fuse="yes")  # type: ignore[arg-type]


def test_fused_casts_of_a_frozen_layer_gather_nothing() -> None:
    model: Any = frozen(llama(), "tensor_static")
    known = fused_casts.known_scale(model.model.layers[0].mlp.down_proj.plan(0).input, torch.zeros(1))
    assert known is not None
    assert known.gathered is None
