"""Training with CUDA graphs: the blocks of a converted model, forward and backward, replayed.

    python examples/cuda_graphs.py        # graphs need a CUDA device; without one the same steps run without them

What is graphed lies inside of the model, so its sample is like what comes there: the shape of a whole batch, the dtype
that `torch.autocast` gives, and `requires_grad=True`, since the layer before wants a gradient. The last batch of an
epoch is smaller: a call with keyword arguments is never a replay, and takes any shape.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import octavo
from octavo.recipes import DelayedScaling

FEATURES, WIDTH, BATCH, IMAGES, EPOCHS = 32, 128, 64, 5 * 64 + 24, 6


class Model(nn.Module):
    """[tokens, FEATURES] -> [tokens, FEATURES]: a layer, the blocks to be graphed, a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, FEATURES)
        self.blocks = nn.Sequential(nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        """Whole batches go through the graph, once there is one; others through the layers."""
        return self.leave(self.blocks(self.enter(x)))


def autocast(device: str) -> torch.autocast:
    """Casts that come from a cache would outlive a graph."""
    return torch.autocast(device, torch.bfloat16, cache_enabled=False)


def train(model: Model, optimizer: torch.optim.Optimizer, data: Tensor) -> float:
    """One epoch; the mean loss."""
    losses = []
    for x in data.split(BATCH):
        with autocast(data.device.type):
            y = model(x)
        loss = nn.functional.mse_loss(y.float(), x.flip(1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        octavo.update_scales(model)  # outside of the graph, which holds forward and backward alone
        losses.append(loss.detach())
    return float(torch.stack(losses).mean())


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Model().to(device)
    octavo.convert(model, DelayedScaling(amax_history_len=16), filter="all")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = torch.randn(IMAGES, FEATURES, device=device)

    print(f"epoch 1, without graphs: loss {train(model, optimizer, data):.3f}")
    if device == "cuda":
        sample = torch.randn(BATCH, WIDTH, device=device, dtype=torch.bfloat16, requires_grad=True)
        with autocast(device):
            model.blocks = octavo.make_graphed_callables(model.blocks, (sample,))
        how = "by graphs"
    else:
        print("no CUDA device here: CUDA graphs need one, so the other epochs run without them, FP8 emulated")
        how = "without graphs"
    for epoch in range(2, EPOCHS + 1):
        print(f"epoch {epoch}, {how}: loss {train(model, optimizer, data):.3f}")


if __name__ == "__main__":
    main()
