"""Small models of transformers, with random weights, whose structure is known; and twins to compare them with."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import octavo
from octavo.conversion.known_parts import activation_name, known_norm
from octavo.functional import activate

WIDTH = 32


def gpt2(layers: int = 2, **options: Any) -> nn.Module:
    import transformers

    options = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0} | options
    config = transformers.GPT2Config(
        vocab_size=96, n_positions=32, n_embd=WIDTH, n_layer=layers, n_head=2, bos_token_id=0, eos_token_id=0, **options
    )
    return transformers.GPT2LMHeadModel(config)


def decoder(kind: str, layers: int = 2, **options: Any) -> nn.Module:
    """Llama, Mistral, Qwen2, Qwen3."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        vocab_size=96, hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, head_dim=16, **options,
    )  # fmt: skip
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def vit(layers: int = 2, **options: Any) -> nn.Module:
    import transformers

    config = transformers.ViTConfig(
        hidden_size=WIDTH, num_hidden_layers=layers, num_attention_heads=2, intermediate_size=64, image_size=16,
        patch_size=8, num_labels=96, **options,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def bert(layers: int = 2, **options: Any) -> nn.Module:
    import transformers

    options = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0} | options
    config = transformers.BertConfig(
        vocab_size=96, hidden_size=WIDTH, num_hidden_layers=layers, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=32, **options,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def timm_vit(layers: int = 2, **options: Any) -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        img_size=16, patch_size=8, embed_dim=WIDTH, depth=layers, num_heads=2, num_classes=96, **options
    )


MODELS: dict[str, Callable[..., nn.Module]] = {
    "GPT-2": gpt2,
    "Llama": lambda *a, **k: decoder("Llama", *a, **k),
    "Mistral": lambda *a, **k: decoder("Mistral", *a, **k),
    "Qwen2": lambda *a, **k: decoder("Qwen2", *a, **k),
    "Qwen3": lambda *a, **k: decoder("Qwen3", *a, **k),
    "BERT": bert,
    "ViT": vit,
}


def batch(model: nn.Module, seed: int = 0, device: str = "cpu") -> dict[str, Tensor]:
    """Three samples, as keyword arguments."""
    generator = torch.Generator().manual_seed(seed)
    if "Vi" in type(model).__name__:
        name = "x" if type(model).__module__.startswith("timm") else "pixel_values"
        return {name: torch.randn(3, 3, 16, 16, generator=generator).to(device)}
    return {"input_ids": torch.randint(0, 96, (3, 17), generator=generator).to(device)}


def logits(model: nn.Module, seed: int = 0) -> Tensor:
    out = model(**batch(model, seed, str(next(model.parameters()).device)))
    return out if isinstance(out, Tensor) else out.logits


def loss_of(model: nn.Module, seed: int = 0) -> Tensor:
    """Of targets that a model can learn: a fixed class a position."""
    y = logits(model, seed).float().flatten(0, -2)
    return nn.functional.cross_entropy(y, torch.arange(len(y), device=y.device) % 17)


class Activation(nn.Module):
    """Octavo's own, as a module."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, z: Tensor) -> Tensor:
        return activate(z, self.name)


def with_octavos_parts(model: nn.Module) -> nn.Module:
    """What would be fused with Octavo's own activations and normalisations in it: the bits that are promised."""
    fused = {one.name for one in octavo.convert(model, filter="all", dry_run=True).fused}
    for parent_name, module in list(model.named_modules()):
        for child_name, child in list(module.named_children()):
            name = f"{parent_name}.{child_name}" if parent_name else child_name
            norm, activation = known_norm(child), activation_name(child)
            if norm is not None and name in fused:
                setattr(module, child_name, _octavos(child, norm))
            elif activation is not None and any(name.startswith(f"{one}.") for one in fused):
                setattr(module, child_name, Activation(activation))
    return model


def _octavos(child: Any, norm: Any) -> nn.Module:
    kind = octavo.LayerNorm if norm.normalization == "LayerNorm" else octavo.RMSNorm
    own = kind(child.weight.shape[0], eps=norm.eps)
    own.weight = child.weight
    if norm.normalization == "LayerNorm":
        own.bias = child.bias
    return own.train(child.training)


def llama(layers: int = 1, **options: Any) -> nn.Module:
    return decoder("Llama", layers, **options)


def _as_part_of_timm() -> Any:
    """The classes of a module are told by its package, and as unpatched by its file."""
    spec = importlib.util.spec_from_file_location("timm.alike", Path(__file__).with_name("timm_alike.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


Block: Any = _as_part_of_timm().Block


def not_fused(report: octavo.ConversionReport, ending: str) -> str:
    """The reason of the one structure whose name ends so."""
    [reason] = [one.reason for one in report.unfused if one.name.endswith(ending)]
    return reason
