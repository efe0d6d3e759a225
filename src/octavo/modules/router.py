"""octavo.TopKRouter: which experts a token goes to, with which probability.

logits [T, E] = x weight^T          x [..., in], weight [E, in]; in float32, whatever the dtype of the two
routing       = `octavo.functional.routing.route`
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from octavo.functional.routing import Routing, ScoreFunction, route
from octavo.modules.layernorm_linear import check_input


class TopKRouter(nn.Module):
    """The k best experts of each token.

    Args:
        in_features: of a token.
        num_experts: E.
        top_k: k.
        score_function: "softmax" or "sigmoid".
        softmax_before_choice: probabilities of the softmax over all experts, not over the chosen ones.
        scaling_factor: of the probabilities.
        aux_loss_coefficient, z_loss_coefficient: weights of the load-balancing loss and of the z loss.
        expert_bias: with a buffer `expert_bias` [E], added to the scores of "sigmoid" for the choice alone: for whoever
            balances the load by it.
        device, dtype: of the weight, drawn as `nn.Linear`'s.
    """

    expert_bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_experts: int,
        top_k: int,
        *,
        score_function: ScoreFunction = "softmax",
        softmax_before_choice: bool = False,
        scaling_factor: float = 1.0,
        aux_loss_coefficient: float = 0.0,
        z_loss_coefficient: float = 0.0,
        expert_bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.num_experts, self.top_k = in_features, num_experts, top_k
        one: Any = nn.Linear(in_features, num_experts, False, device=device, dtype=dtype)
        self.weight = one.weight
        self.register_buffer("expert_bias", torch.zeros(num_experts, device=device) if expert_bias else None)
        self.options: dict[str, Any] = {
            "score_function": score_function,
            "softmax_before_choice": softmax_before_choice,
            "scaling_factor": scaling_factor,
            "aux_loss_coefficient": aux_loss_coefficient,
            "z_loss_coefficient": z_loss_coefficient,
        }
        # Options that do not fit are refused here, not at the first batch.
        route(torch.zeros(1, num_experts), top_k, expert_bias=self._bias_on_cpu(), **self.options)

    def _bias_on_cpu(self) -> Tensor | None:
        return None if self.expert_bias is None else torch.zeros(self.num_experts)

    def forward(self, x: Tensor) -> Routing:
        """Routing of the tokens x [..., in_features], T of them in their order."""
        check_input(x, self.in_features)
        rows = x.reshape(x.shape[:-1].numel(), self.in_features)
        # A choice between experts hangs on the last bits: not in the dtype of torch.autocast.
        with torch.autocast(x.device.type, enabled=False):
            logits = nn.functional.linear(rows.float(), self.weight.float())
            return route(logits, self.top_k, expert_bias=self.expert_bias, **self.options)

    def extra_repr(self) -> str:
        """Extents and options."""
        shown = ", ".join(f"{name}={value}" for name, value in self.options.items())
        return f"in_features={self.in_features}, num_experts={self.num_experts}, top_k={self.top_k}, {shown}"
