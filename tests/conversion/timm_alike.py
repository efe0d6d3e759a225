"""An MLP and a block as timm has them, for where it is missing; `known_models` imports this file as part of timm."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Mlp(nn.Module):
    """As timm has it."""

    def __init__(self, drop: float = 0.0, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.fc1, self.act, self.drop1 = nn.Linear(32, 64), nn.GELU(), nn.Dropout(drop)
        self.norm = norm or nn.Identity()
        self.fc2, self.drop2 = nn.Linear(64, 32), nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        x = self.act(x)
        x = self.drop1(x)
        x = self.norm(x)
        x = self.fc2(x)
        return self.drop2(x)


class Block(nn.Module):
    """As timm has it, without attention."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm2, self.mlp = nn.LayerNorm(32, eps=1e-6), Mlp(**options)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm2(x))
