"""octavo.TopKRouter: which experts a token goes to, with which probability.

logits [T, E] = x weight^T          x [..., in], weight [E, in]; in float32, whatever the dtype of the two
routing       = `octavo.functional.routing.route`
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from octavo.functional.grouped_sizes import is_integer
from octavo.functional.routing import Routing, ScoreFunction, route
from octavo.modules.given_input import check_input


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
            balances the load by it. It stays float32 whatever the module is cast to, so that small steps count.
        device, dtype: of the weight, drawn as `nn.Linear`'s.

    Raises:
        ValueError: options that do not fit.
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
        _check_extents(in_features, num_experts)
        _check_switches(softmax_before_choice, expert_bias)
        self.in_features, self.num_experts, self.top_k = in_features, num_experts, top_k
        one: Any = nn.Linear(in_features, num_experts, False, device=device, dtype=dtype)
        self.weight = one.weight
        self.register_buffer("expert_bias", _no_bias(num_experts, device) if expert_bias else None)
        self.options: dict[str, Any] = {
            "score_function": score_function,
            "softmax_before_choice": softmax_before_choice,
            "scaling_factor": scaling_factor,
            "aux_loss_coefficient": aux_loss_coefficient,
            "z_loss_coefficient": z_loss_coefficient,
        }
        # Options that do not fit are refused here, not at the first batch.
        tried = _no_bias(num_experts, "cpu") if expert_bias else None
        route(torch.zeros(1, num_experts, device="cpu"), top_k, expert_bias=tried, **self.options)

    def forward(self, x: Tensor) -> Routing:
        """Routing of the tokens x [..., in_features], T of them in their order."""
        check_input(x, self.in_features, self, "x")
        rows = x.reshape(x.shape[:-1].numel(), self.in_features)
        # A choice between experts hangs on the last bits: not in the dtype of torch.autocast.
        with torch.autocast(x.device.type, enabled=False):
            logits = nn.functional.linear(rows.float(), self.weight.float())
            return route(logits, self.top_k, expert_bias=self.expert_bias, **self.options)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        before = self.expert_bias
        module = super()._apply(fn, recurse)
        after = self.expert_bias
        if before is not None and after is not None and after.dtype != torch.float32:
            # Moved as it was: casting back what has been cast would keep the loss.
            self.expert_bias = before.to(after.device)
        return module

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        if self.expert_bias is not None:
            # With assign=True it has come as it was saved.
            self.expert_bias = self.expert_bias.float()

    def extra_repr(self) -> str:
        """Extents and options."""
        shown = ", ".join(f"{name}={value}" for name, value in self.options.items())
        return f"in_features={self.in_features}, num_experts={self.num_experts}, top_k={self.top_k}, {shown}"


def _no_bias(num_experts: int, device: torch.device | str | None) -> Tensor:
    return torch.zeros(num_experts, device=device, dtype=torch.float32)


def _check_extents(in_features: int, num_experts: int) -> None:
    for name, value in (("in_features", in_features), ("num_experts", num_experts)):
        if not is_integer(value) or value < 1:
            raise ValueError(f"{name} is {value!r}: expected an integer of 1 or more")


def _check_switches(softmax_before_choice: bool, expert_bias: bool) -> None:
    for name, value in (("softmax_before_choice", softmax_before_choice), ("expert_bias", expert_bias)):
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}: expected True or False")
