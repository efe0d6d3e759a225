"""`te.RotaryPositionEmbedding` and `te.attention.apply_rotary_pos_emb`, over Octavo's.

Source: transformer_engine/pytorch/attention/rope.py of Transformer Engine 2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.compat.planned import refuse
from octavo.compat.transformer_engine.pytorch.construction import placed, refuse_planned
from octavo.modules import RotaryPositionEmbedding as OctavoRotaryPositionEmbedding
from octavo.modules.attention_cache import turned


class RotaryPositionEmbedding(OctavoRotaryPositionEmbedding):
    """Angles of rotary position embeddings with TE's arguments.

    Args:
        dim, rotary_percent, rotary_base, interleaved: as of `octavo.RotaryPositionEmbedding`.
        seq_len_interpolation_factor: every position is divided by it.
        pretrained_max_position_embeddings: not built.
    """

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: int | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
    ) -> None:
        refuse_planned("RotaryPositionEmbedding", pretrained_max_position_embeddings=pretrained_max_position_embeddings)
        factor = 1.0 if seq_len_interpolation_factor is None else float(seq_len_interpolation_factor)
        super().__init__(
            dim,
            rotary_percent,
            interleaved=interleaved,
            rotary_base=rotary_base,
            scaling="none" if factor == 1.0 else "linear",
            factor=factor,
        )

    def forward(self, max_seq_len: int, offset: int = 0, device: torch.device | str | None = None) -> Tensor:
        """[max_seq_len, 1, 1, R] float32, on the GPU where there is one.

        Args:
            max_seq_len: how many positions.
            offset: the first of them.
            device: where instead.
        """
        return super().forward(max_seq_len, offset, placed("cuda") if device is None else device)


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """Heads turned by the angles of their places, of t's shape and dtype.

    Args:
        t: [S, B, H, D], [B, S, H, D] or [T, H, D], by `tensor_format`.
        freqs: [longest, 1, 1, R], of `te.RotaryPositionEmbedding`.
        tensor_format: "sbhd", "bshd" or "thd".
        start_positions: [B], the place of the first token of each sequence; 0 if None.
        interleaved: pairs are neighbouring features.
        fused: changes nothing: there is one way to compute it.
        cu_seqlens: of "thd", where each sequence begins.
        cp_size, cp_rank: more than one rank is not built.
    """
    if cp_size > 1:
        refuse(f"te.attention.apply_rotary_pos_emb with a context-parallel group of {cp_size} ranks (cp_size)")
    if tensor_format not in ("sbhd", "bshd", "thd"):
        raise ValueError(f"tensor_format is {tensor_format!r}: expected 'sbhd', 'bshd' or 'thd'")
    starts: Any = (0,) if start_positions is None else tuple(start_positions.tolist())
    return turned(t, freqs.to(t.device), tensor_format, starts, cu_seqlens, interleaved)


__all__ = ["RotaryPositionEmbedding", "apply_rotary_pos_emb"]
