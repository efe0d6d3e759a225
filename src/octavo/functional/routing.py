"""Which experts a token goes to: the k best scores, their probabilities, and what keeps the load even.

    s [T, E]     softmax(logits), or sigmoid(logits)
    indices      the k experts of the largest s (+ bias of the expert, which only chooses)
    probs [T, k] s of these; "softmax" after the choice: the softmax of their logits alone
    load loss    E * sum over e of f_e P_e        f_e: part of the choices that fell on e; P_e: mean of s over tokens
    z loss       mean over tokens of log(sum over e of exp(logits))^2

The load loss is that of the Switch Transformer (arXiv 2101.03961): 1 if the load is even, E / k if k experts have it
all. f has no gradient. All of it in float32; equal scores go to the expert of the lower number, so that every device
chooses alike.
"""

from __future__ import annotations

import math
import numbers
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from octavo.functional.grouped_sizes import is_integer

ScoreFunction = Literal["softmax", "sigmoid"]


class Routing(NamedTuple):
    """What a router decides.

    Attributes:
        probs: [T, k] float32, the weights of a token's experts, largest score first.
        indices: [T, k] int64, its experts.
        aux_loss: [], float32: the weighted sum of the losses; 0 where none was asked for.
        m_splits: [E] int32, tokens of each expert.
    """

    probs: Tensor
    indices: Tensor
    aux_loss: Tensor
    m_splits: Tensor

    @property
    def mask(self) -> Tensor:
        """[T, E] bool, the mask form of `indices`."""
        chosen = torch.zeros(
            (self.indices.shape[0], self.m_splits.shape[0]), dtype=torch.bool, device=self.indices.device
        )
        return chosen.scatter_(1, self.indices, True)


def route(
    logits: Tensor,
    top_k: int,
    *,
    score_function: ScoreFunction = "softmax",
    softmax_before_choice: bool = False,
    expert_bias: Tensor | None = None,
    scaling_factor: float = 1.0,
    aux_loss_coefficient: float = 0.0,
    z_loss_coefficient: float = 0.0,
) -> Routing:
    """The k best experts of each token.

    Args:
        logits: [T, E], any floating dtype.
        top_k: k.
        score_function: "softmax", or "sigmoid": then probabilities are divided by their sum, if k is more than 1.
        softmax_before_choice: probabilities are those of the softmax over all experts, which sum to less than 1.
        expert_bias: [E], added to the scores for the choice alone; for "sigmoid".
        scaling_factor: of the probabilities, above 0.
        aux_loss_coefficient, z_loss_coefficient: weights of the two losses; 0 leaves one out.

    Raises:
        ValueError: options or shapes do not fit.
    """
    _check(logits, top_k, score_function, softmax_before_choice, expert_bias)
    check_weights(scaling_factor, aux_loss_coefficient, z_loss_coefficient)
    num_experts = logits.shape[1]
    logits = logits.float()
    # 1. Scores of all experts.  [T, E]
    scores = logits.sigmoid() if score_function == "sigmoid" else logits.softmax(-1)
    # 2. The best; stable, so that of equal ones the first is taken. The order of softmax is that of the logits.
    by = logits if score_function == "softmax" else scores if expert_bias is None else scores + expert_bias
    indices = torch.sort(by.detach(), dim=-1, descending=True, stable=True).indices[:, :top_k]
    # 3. Their probabilities.  [T, k]
    if score_function == "sigmoid":
        probs = scores.gather(1, indices)
        probs = probs / (probs.sum(-1, keepdim=True) + 1e-20) if top_k > 1 else probs
    elif softmax_before_choice:
        probs = scores.gather(1, indices)
    else:
        probs = logits.gather(1, indices).softmax(-1)
    probs = probs * scaling_factor if scaling_factor != 1.0 else probs
    # 4. The load.  [E]
    experts = torch.arange(num_experts, device=logits.device)
    splits = (indices.reshape(-1, 1) == experts).sum(0, dtype=torch.int32)
    # 5. The losses.
    loss = logits.new_zeros(())
    if aux_loss_coefficient:
        shares = scores if score_function == "softmax" else scores / (scores.sum(-1, keepdim=True) + 1e-20)
        loss = loss + aux_loss_coefficient * load_balancing_loss(shares, splits, top_k)
    if z_loss_coefficient:
        loss = loss + z_loss_coefficient * z_loss(logits)
    return Routing(probs, indices, loss, splits)


def load_balancing_loss(scores: Tensor, m_splits: Tensor, top_k: int) -> Tensor:
    """E * sum of f_e P_e -> []. scores [T, E], each row summing to 1; m_splits [E], choices that fell on each."""
    tokens, num_experts = scores.shape
    whole = max(tokens, 1)
    # 1. Part of the choices, and of the scores, that an expert has.  [E]
    chosen = m_splits.to(scores.dtype) / (whole * top_k)
    share = scores.sum(0) / whole
    # 2. []
    return num_experts * (chosen * share).sum()


def z_loss(logits: Tensor) -> Tensor:
    """Mean square of the logarithm of the softmax's denominator -> []. logits [T, E]."""
    return logits.logsumexp(-1).square().sum() / max(logits.shape[0], 1)


def check_weights(scaling_factor: float, aux_loss_coefficient: float, z_loss_coefficient: float) -> None:
    """Numbers that scale something.

    Raises:
        ValueError: one is no finite number of 0 or more, the first of more than 0.
    """
    named = (("aux_loss_coefficient", aux_loss_coefficient), ("z_loss_coefficient", z_loss_coefficient))
    for name, value in named:
        if not _is_finite(value) or value < 0:
            raise ValueError(f"{name} is {value!r}: expected a finite number of 0 or more; 0 leaves the loss out")
    if not _is_finite(scaling_factor) or scaling_factor <= 0:
        raise ValueError(f"scaling_factor is {scaling_factor!r}: expected a finite number above 0; 1.0 changes nothing")


def _is_finite(value: Any) -> bool:
    return type(value) is not bool and isinstance(value, numbers.Real) and math.isfinite(value)


def _check(
    logits: Tensor, top_k: int, score_function: str, softmax_before_choice: bool, expert_bias: Tensor | None
) -> None:
    if logits.dim() != 2:
        raise ValueError(f"logits have shape {tuple(logits.shape)}: expected [T, E]")
    if not is_integer(top_k) or not 1 <= top_k <= logits.shape[1]:
        raise ValueError(f"top_k is {top_k!r}: a token goes to from 1 to {logits.shape[1]} experts, an integer")
    if score_function not in ("softmax", "sigmoid"):
        raise ValueError(f"score_function is {score_function!r}: expected 'softmax' or 'sigmoid'")
    if score_function == "sigmoid" and softmax_before_choice:
        raise ValueError("softmax_before_choice has no use with score_function='sigmoid': leave one of them out")
    if expert_bias is not None and (score_function != "sigmoid" or expert_bias.shape != logits.shape[1:]):
        raise ValueError(
            f"expert_bias of shape {tuple(expert_bias.shape)} with score_function={score_function!r}: it is"
            f" [{logits.shape[1]}], for score_function='sigmoid'"
        )
