"""Amax and scale over time, read from the state that layers with delayed scaling keep in their state dict."""

from __future__ import annotations

from torch import nn

from octavo.study.record import Row

OPERANDS = ("input", "weight", "grad_output")
_MOST_LAYERS = 6


def scale_rows(model: nn.Module, method: str, step: int) -> list[Row]:
    """`scale_history` rows of up to six layers, evenly chosen: the newest amax and the scale of each operand."""
    state = model.state_dict()
    layers = [name.removesuffix(".input_scale") for name in state if name.endswith(".input_scale")]
    chosen = layers[:: max(1, -(-len(layers) // _MOST_LAYERS))]
    rows = []
    for layer in chosen:
        for operand in OPERANDS:
            history = state.get(f"{layer}.{operand}_amax_history")
            scale = state.get(f"{layer}.{operand}_scale")
            if history is None or scale is None:
                continue
            # Position 0 gathers the current step; the past follows, the oldest first.
            amax = history[-1] if history.numel() > 1 else history[0]
            rows.append(
                {
                    "kind": "scale_history",
                    "method": method,
                    "step": step,
                    "layer": layer,
                    "operand": operand,
                    "amax": float(amax),
                    "scale": float(scale),
                }
            )
    return rows
