"""A vision transformer to try FP8 on: timm's where timm imports, else one built from the parts of transformers.

    model = build_vit("small", class_token=False)
    logits = model(images)          # images [B, 3, S, S] -> logits [B, classes]

With average pooling the sequence holds the patches alone (256 of them in "huge"); with a class token it is one longer
(257, no multiple of 16), which FP8 products have to pad.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ViTSize:
    """Shape of a vision transformer, and the batch that it is trained with."""

    img_size: int
    patch_size: int
    embed_dim: int
    depth: int
    num_heads: int
    num_classes: int
    batch_size: int

    @property
    def num_patches(self) -> int:
        """Tokens of an image, class token aside."""
        return (self.img_size // self.patch_size) ** 2


PRESETS = {
    # 632 million parameters.
    "huge": ViTSize(256, 16, embed_dim=1280, depth=32, num_heads=16, num_classes=1024, batch_size=32),
    "small": ViTSize(64, 16, embed_dim=128, depth=2, num_heads=4, num_classes=32, batch_size=4),
}


def build_vit(preset: str = "small", class_token: bool = False) -> nn.Module:
    """The model of a preset, with random weights, on the CPU in float32."""
    size = PRESETS[preset]
    try:
        from timm.models.vision_transformer import VisionTransformer
    except (ImportError, RuntimeError):  # RuntimeError: a torchvision that was built for another torch
        return TransformersViT(size, class_token)
    return VisionTransformer(
        img_size=size.img_size,
        patch_size=size.patch_size,
        embed_dim=size.embed_dim,
        depth=size.depth,
        num_heads=size.num_heads,
        num_classes=size.num_classes,
        class_token=class_token,
        global_pool="token" if class_token else "avg",
    )


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The transformer blocks, for compiling them one by one."""
    return [m for m in model.modules() if type(m).__name__ in ("Block", "ViTLayer")]


def name_of(model: nn.Module) -> str:
    """Where the model comes from, for the record."""
    return f"{type(model).__module__.split('.')[0]}.{type(model).__name__}"


class PatchesOnly(nn.Module):
    """Embeddings of a transformers ViT without its class token."""

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.patch_embeddings = embeddings.patch_embeddings
        self.position_embeddings = nn.Parameter(embeddings.position_embeddings.detach()[:, 1:].clone())

    def forward(self, pixel_values: Tensor, **_: Any) -> Tensor:
        """[B, 3, S, S] -> [B, patches, D]"""
        return self.patch_embeddings(pixel_values) + self.position_embeddings


class TransformersViT(nn.Module):
    """transformers' ViT with a linear head on the class token, or on the mean of the patches."""

    def __init__(self, size: ViTSize, class_token: bool) -> None:
        super().__init__()
        from transformers import ViTConfig, ViTModel

        config = ViTConfig(
            hidden_size=size.embed_dim,
            num_hidden_layers=size.depth,
            num_attention_heads=size.num_heads,
            intermediate_size=4 * size.embed_dim,
            image_size=size.img_size,
            patch_size=size.patch_size,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self.vit = ViTModel(config, add_pooling_layer=False)
        if not class_token:
            self.vit.embeddings = PatchesOnly(self.vit.embeddings)
        self.class_token = class_token
        self.head = nn.Linear(size.embed_dim, size.num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """[B, 3, S, S] -> [B, classes]"""
        tokens = self.vit(images).last_hidden_state
        return self.head(tokens[:, 0] if self.class_token else tokens.mean(1))


if __name__ == "__main__":
    for name, size in PRESETS.items():
        with torch.device("meta" if name == "huge" else "cpu"):
            model = build_vit(name)
        count = sum(p.numel() for p in model.parameters())
        print(f"{name}: {name_of(model)}, {count / 1e6:.1f} million parameters, {size.num_patches} patches")
