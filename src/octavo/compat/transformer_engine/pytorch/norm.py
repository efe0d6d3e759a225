"""`te.LayerNorm` and `te.RMSNorm`: Octavo's with Transformer Engine's signature.

Source: transformer_engine/pytorch/module/layernorm.py and rmsnorm.py of Transformer Engine 2.
"""

from __future__ import annotations

from typing import Any

import torch

from octavo.compat.transformer_engine.pytorch.construction import drop_extra_state, placed
from octavo.modules import LayerNorm as OctavoLayerNorm
from octavo.modules import RMSNorm as OctavoRMSNorm

Shape = int | list[int] | torch.Size


class LayerNorm(OctavoLayerNorm):
    """Normalised rows with TE's arguments.

    Args:
        normalized_shape: of what is normalised; `hidden_size` is its older name.
        eps: added to the variance.
        sequence_parallel: changes nothing with one rank.
        params_dtype: of the parameters; `dtype` is its other name; torch's default dtype if None.
        zero_centered_gamma: the layer scales by 1 + weight, which begins at 0.
        device: "cuda" falls back to the CPU where there is no GPU, with one warning.
    """

    def __init__(
        self,
        normalized_shape: Shape | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: Shape | None = None,
        *,
        device: torch.device | str = "cuda",
        dtype: torch.dtype | None = None,
    ) -> None:
        shape, kind = _shape(normalized_shape, hidden_size), _dtype(params_dtype, dtype)
        super().__init__(shape, eps, device=placed(device), dtype=kind, zero_centered_gamma=zero_centered_gamma)
        self.sequence_parallel = bool(sequence_parallel)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        drop_extra_state(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class RMSNorm(OctavoRMSNorm):
    """As `te.LayerNorm`, without mean and bias.

    Args:
        normalized_shape, eps, sequence_parallel, params_dtype, zero_centered_gamma, hidden_size, device, dtype: as of
            `te.LayerNorm`.
    """

    def __init__(
        self,
        normalized_shape: Shape | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: Shape | None = None,
        *,
        device: torch.device | str = "cuda",
        dtype: torch.dtype | None = None,
    ) -> None:
        shape, kind = _shape(normalized_shape, hidden_size), _dtype(params_dtype, dtype)
        super().__init__(shape, eps, device=placed(device), dtype=kind, zero_centered_gamma=zero_centered_gamma)
        self.sequence_parallel = bool(sequence_parallel)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        drop_extra_state(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _shape(normalized_shape: Shape | None, hidden_size: Shape | None) -> Shape:
    if (normalized_shape is None) == (hidden_size is None):
        raise ValueError(
            f"normalized_shape is {normalized_shape} and hidden_size {hidden_size}: they are one setting under two"
            " names, give one of them"
        )
    found = hidden_size if normalized_shape is None else normalized_shape
    assert found is not None, "one of the two is given"
    return found


def _dtype(params_dtype: torch.dtype | None, dtype: torch.dtype | None) -> torch.dtype | None:
    if params_dtype is not None and dtype is not None:
        raise ValueError("params_dtype and dtype are one setting under two names: give one of them")
    return dtype if params_dtype is None else params_dtype


__all__ = ["LayerNorm", "RMSNorm"]
