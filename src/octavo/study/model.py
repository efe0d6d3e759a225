"""A GPT-2-shaped language model of plain torch layers, so that `octavo.convert` can do its work on it.

Pre-norm blocks, learned positions, GELU (tanh form, as GPT-2), a head tied to the token embedding. With a cache
of keys and values a forward pass continues a sequence: it costs one token's work a token, not a whole prefix.

Shape legend: B batch, T new tokens, P cached tokens, C width, H heads, D = C / H, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a model; `dropout` acts in training only."""

    layers: int
    width: int
    heads: int
    context: int
    vocab_size: int
    dropout: float = 0.0

    def __post_init__(self) -> None:
        """Refuse shapes that cannot be built."""
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is no multiple of heads {self.heads}")


class KeyValueCache:
    """Keys and values of the tokens seen so far, preallocated: [layers][2][B, H, context, D]."""

    def __init__(self, shape: ModelShape, batch: int, device: torch.device, dtype: torch.dtype) -> None:
        """Allocate for `batch` sequences of up to `shape.context` tokens."""
        size = (batch, shape.heads, shape.context, shape.width // shape.heads)
        self.keys = [torch.zeros(size, device=device, dtype=dtype) for _ in range(shape.layers)]
        self.values = [torch.zeros(size, device=device, dtype=dtype) for _ in range(shape.layers)]
        self.length = 0
        self.capacity = shape.context

    def extend(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store k and v [B, H, T, D] behind what is there; return all of them, [B, H, P + T, D]."""
        end = self.length + k.shape[2]
        self.keys[layer][:, :, self.length : end] = k
        self.values[layer][:, :, self.length : end] = v
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]


class Attention(nn.Module):
    """Causal self-attention: one projection to q, k and v, one back."""

    def __init__(self, shape: ModelShape, layer: int) -> None:
        """Build for block number `layer`, which is its place in the cache."""
        super().__init__()
        self.heads, self.layer, self.dropout = shape.heads, layer, shape.dropout
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.proj = nn.Linear(shape.width, shape.width)

    def forward(self, x: torch.Tensor, cache: KeyValueCache | None) -> torch.Tensor:
        """[B, T, C] -> [B, T, C]."""
        batch, tokens, width = x.shape
        qkv = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, H, T, D]
        past = 0
        if cache is not None:
            past = cache.length
            k, v = cache.extend(self.layer, k.to(cache.keys[0].dtype), v.to(cache.values[0].dtype))
            q = q.to(k.dtype)
        mask = None
        if past and tokens > 1:  # new token i sees the past and the new tokens up to i
            mask = torch.ones(tokens, past + tokens, dtype=torch.bool, device=x.device).tril(past)
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=past == 0 and tokens > 1,
        )
        out: torch.Tensor = self.proj(y.transpose(1, 2).reshape(batch, tokens, width))
        return out


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, shape: ModelShape, layer: int) -> None:
        """Build block number `layer`."""
        super().__init__()
        self.norm_1 = nn.LayerNorm(shape.width)
        self.attention = Attention(shape, layer)
        self.norm_2 = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: torch.Tensor, cache: KeyValueCache | None) -> torch.Tensor:
        """[B, T, C] -> [B, T, C]."""
        x = x + self.dropout(self.attention(self.norm_1(x), cache))
        out: torch.Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh")))
        return out


class GPT(nn.Module):
    """The whole model: tokens in, logits out.

    `head_name` names the layer that stays in 16 bits in every method: its error would go straight into the logits.
    """

    head_name = "lm_head"

    def __init__(self, shape: ModelShape) -> None:
        """Build and initialise as GPT-2: normal(0, 0.02), residual projections scaled by 1 / sqrt(2 layers)."""
        super().__init__()
        self.shape = shape
        self.token_embedding = nn.Embedding(shape.vocab_size, shape.width)
        self.position_embedding = nn.Embedding(shape.context, shape.width)
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape, layer) for layer in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.lm_head = nn.Linear(shape.width, shape.vocab_size, bias=False)
        self.lm_head.weight = self.token_embedding.weight
        self._initialise()

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for name, parameter in self.named_parameters():
            if name.endswith(("proj.weight", "down.weight")):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * self.shape.layers))

    def new_cache(self, batch: int) -> KeyValueCache:
        """An empty cache for `batch` sequences, on the model's device and in its embedding's dtype."""
        weight = self.token_embedding.weight
        return KeyValueCache(self.shape, batch, weight.device, weight.dtype)

    def forward(self, tokens: torch.Tensor, cache: KeyValueCache | None = None) -> torch.Tensor:
        """Logits [B, T, V] of int64 tokens [B, T]; with a cache, of tokens that follow those seen before.

        Raises ValueError when the sequence outgrows the context.
        """
        past = 0 if cache is None else cache.length
        length = tokens.shape[1]
        if past + length > self.shape.context:
            raise ValueError(f"{past + length} tokens do not fit into the context of {self.shape.context}")
        positions = torch.arange(past, past + length, device=tokens.device)
        x = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        for block in self.blocks:
            x = block(x, cache)
        if cache is not None:
            cache.length = past + length
        logits: torch.Tensor = self.lm_head(self.norm(x))
        return logits


def build_model(shape: ModelShape, seed: int) -> GPT:
    """A freshly initialised model; the same seed gives the same weights, and no other random state is touched."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT(shape)
