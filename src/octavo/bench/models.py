"""The models whose training steps are measured, at full size and in a small form that a CPU can train."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.modules import TransformerLayer

Sizes = dict[str, int]


class Batch(NamedTuple):
    """Inputs and targets of one step."""

    inputs: Tensor
    targets: Tensor


@dataclass(frozen=True)
class ModelCase:
    """A model to train.

    Attributes:
        key: its name in the record.
        needs: the library that defines it.
        build: of its sizes, on the default device, in float32.
        sizes, small: at full size, and for a CPU.
        batch, small_batch: samples in a step.
        unit: what is counted.
        per_sample: of the sizes, how many of that a sample has.
        blocks: the parts that are compiled one by one.
        loss: of model and batch.
        make_batch: of sizes, samples and device.
    """

    key: str
    needs: str
    build: Callable[[Sizes], nn.Module]
    sizes: Sizes
    small: Sizes
    batch: int
    small_batch: int
    unit: str
    per_sample: Callable[[Sizes], int]
    blocks: Callable[[Any], list[nn.Module]]
    loss: Callable[[Any, Tensor, Tensor], Tensor]
    make_batch: Callable[[Sizes, int, torch.device], Batch]

    def reason(self) -> str | None:
        """Why it cannot be built here, or None."""
        return None if importlib.util.find_spec(self.needs) is not None else f"{self.needs} is not installed"


class LossModel(nn.Module):
    """A model and its loss as one module of (inputs, targets), so that it can be graphed as one."""

    def __init__(self, model: nn.Module, loss: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss [] of a batch."""
        return self.loss(self.model, inputs, targets)


def _vit(sizes: Sizes) -> nn.Module:
    timm: Any = importlib.import_module("timm.models.vision_transformer")
    model: nn.Module = timm.VisionTransformer(
        class_token=False,
        global_pool="avg",
        img_size=sizes["image"],
        patch_size=sizes["patch"],
        embed_dim=sizes["width"],
        num_classes=sizes["classes"],
        depth=sizes["layers"],
        num_heads=sizes["heads"],
    )
    return model


class LayersViT(nn.Module):
    """A vision transformer without a class token, of TransformerLayers: images [N, 3, size, size] -> [N, classes].

    As timm's with global_pool="avg": patches, positions, layers, the mean over the tokens, a norm, a head.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, patch = sizes["width"], sizes["patch"]
        tokens = (sizes["image"] // patch) ** 2
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(0.02 * torch.randn(1, tokens, width))
        self.blocks = nn.ModuleList(
            TransformerLayer(
                width, 4 * width, sizes["heads"], attn_input_format="bshd", self_attn_mask_type="no_mask", eps=1e-6
            )
            for _ in range(sizes["layers"])
        )
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, sizes["classes"])

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions  # [N, tokens, width]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x.mean(1)))
        return logits


def _images(sizes: Sizes, samples: int, device: torch.device) -> Batch:
    images = torch.randn(samples, 3, sizes["image"], sizes["image"], device=device)
    return Batch(images, torch.randint(0, sizes["classes"], (samples,), device=device))


def _gpt2(sizes: Sizes) -> nn.Module:
    transformers: Any = importlib.import_module("transformers")
    config = transformers.GPT2Config(
        vocab_size=sizes["vocabulary"],
        n_positions=sizes["tokens"],
        n_embd=sizes["width"],
        n_layer=sizes["layers"],
        n_head=sizes["heads"],
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def _llama(sizes: Sizes) -> nn.Module:
    transformers: Any = importlib.import_module("transformers")
    config = transformers.LlamaConfig(
        vocab_size=sizes["vocabulary"],
        hidden_size=sizes["width"],
        intermediate_size=sizes["inner"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["key_value_heads"],
        max_position_embeddings=sizes["tokens"],
        use_cache=False,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def _tokens(sizes: Sizes, samples: int, device: torch.device) -> Batch:
    tokens = torch.randint(0, sizes["vocabulary"], (samples, sizes["tokens"]), device=device)
    return Batch(tokens, tokens)


def _image_loss(model: Any, images: Tensor, classes: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(images), classes)


def _token_loss(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=tokens, labels=labels).loss
    return loss


CASES: dict[str, ModelCase] = {
    "vit": ModelCase(
        key="vit",
        needs="timm",
        build=_vit,
        sizes={"image": 256, "patch": 16, "width": 1280, "classes": 1024, "layers": 32, "heads": 16},
        small={"image": 32, "patch": 8, "width": 64, "classes": 16, "layers": 2, "heads": 2},
        batch=32,
        small_batch=2,
        unit="images/s",
        per_sample=lambda sizes: 1,
        blocks=lambda model: list(model.blocks),
        loss=_image_loss,
        make_batch=_images,
    ),
    "llama": ModelCase(
        key="llama",
        needs="transformers",
        build=_llama,
        sizes={
            "vocabulary": 32000,
            "width": 4096,
            "inner": 14336,
            "layers": 8,
            "heads": 32,
            "key_value_heads": 8,
            "tokens": 8192,
        },
        small={
            "vocabulary": 64,
            "width": 64,
            "inner": 128,
            "layers": 1,
            "heads": 2,
            "key_value_heads": 1,
            "tokens": 16,
        },
        batch=2,
        small_batch=1,
        unit="tokens/s",
        per_sample=lambda sizes: sizes["tokens"],
        blocks=lambda model: list(model.model.layers),
        loss=_token_loss,
        make_batch=_tokens,
    ),
    "gpt2": ModelCase(
        key="gpt2",
        needs="transformers",
        build=_gpt2,
        sizes={"vocabulary": 50304, "width": 768, "layers": 12, "heads": 12, "tokens": 1024},
        small={"vocabulary": 64, "width": 64, "layers": 1, "heads": 2, "tokens": 16},
        batch=16,
        small_batch=1,
        unit="tokens/s",
        per_sample=lambda sizes: sizes["tokens"],
        blocks=lambda model: list(model.transformer.h),
        loss=_token_loss,
        make_batch=_tokens,
    ),
    "vit-layers": ModelCase(
        key="vit-layers",
        needs="torch",
        build=LayersViT,
        sizes={"image": 256, "patch": 16, "width": 1280, "classes": 1024, "layers": 32, "heads": 16},
        small={"image": 32, "patch": 8, "width": 64, "classes": 16, "layers": 2, "heads": 2},
        batch=32,
        small_batch=2,
        unit="images/s",
        per_sample=lambda sizes: 1,
        blocks=lambda model: list(model.blocks),
        loss=_image_loss,
        make_batch=_images,
    ),
}
