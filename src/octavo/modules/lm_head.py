"""octavo.LMHead: the last Linear of a language model, and the loss of its logits without the logits.

    head(hidden)            -> hidden w^T + b     [..., V], as `octavo.Linear`
    head(hidden, targets)   -> its cross-entropy  [] or [...], see `octavo.functional.linear_cross_entropy`

Parameters, their names and initialisation are those of `nn.Linear`, and so is the state dict; the weight can be tied to
that of an embedding. FP8 is on as in `octavo.Linear`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.functional.cross_entropy import Reduction, check_loss
from octavo.functional.linear_cross_entropy import DEFAULT_CHUNK, linear_cross_entropy
from octavo.kernels import amax
from octavo.kernels.cross_entropy import LossRule
from octavo.modules.given_input import called, check_input
from octavo.modules.layernorm_linear import check_cached_weight
from octavo.modules.linear import CachedWeight, Linear
from octavo.recipes import Recipe
from octavo.runtime import layer_call
from octavo.runtime.autocast import in_backward


class LMHead(Linear):
    """A Linear over a vocabulary that gives logits, or their cross-entropy.

        head = octavo.LMHead(768, 50304)
        head.weight = embedding.weight                  # tied
        head(hidden, targets).backward()                # call it, so that hooks and wrappers see it

    Args:
        in_features, out_features, bias, device, dtype: as `nn.Linear`, but without a bias unless asked for.
        ignore_index: tokens of this target count for nothing.
        label_smoothing: this part of each target is spread evenly over the vocabulary.
        reduction: "mean" over the tokens that count, "sum", or "none".
        z_loss: times the square of log sum exp is added to each token's loss.
        chunk_tokens: how many tokens' logits exist at a time.
        recompute: the backward makes the logits again, instead of keeping gradients from the forward on.
        recipe: FP8 with this recipe also outside of `octavo.autocast`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: Reduction = "mean",
        z_loss: float = 0.0,
        chunk_tokens: int = DEFAULT_CHUNK,
        recompute: bool = False,
        recipe: Recipe | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype, recipe=recipe)
        check_loss(LossRule(ignore_index, label_smoothing, z_loss), reduction)
        if type(chunk_tokens) is not int or chunk_tokens < 1:
            raise ValueError(f"chunk_tokens is {chunk_tokens!r}: expected an integer of 1 or more")
        self.ignore_index, self.label_smoothing, self.z_loss = ignore_index, label_smoothing, z_loss
        self.reduction: Reduction = reduction
        self.chunk_tokens, self.recompute = chunk_tokens, recompute

    def forward(
        self, input: Tensor, targets: Tensor | None = None, *, cached_weight: CachedWeight | None = None
    ) -> Tensor:
        """Logits [..., V]; with targets the loss in float32, [], or [...] of reduction "none".

        Args:
            input: [..., in_features].
            targets: [...], classes from 0 to V - 1 or `ignore_index`.
            cached_weight: as of `octavo.Linear`.

        Raises:
            ValueError: the weight was replaced by one of another number of classes.
        """
        self._check_classes()
        if targets is None:
            return self.run(input, cached_weight)
        check_cached_weight(cached_weight)
        weight = self.matrix()
        check_input(input, weight.shape[1], self)
        call = layer_call(self.delayed_state, self.recipe, self.layer_name)
        plan = operand = None
        if call.recipe is not None:
            self._check_recompute(call.recipe)
            plan = self.planned(call, weight)
            operand = self.kept_operand(weight, plan, cached_weight)
        elif call.gather and not in_backward():
            # What a checkpoint recomputes has been gathered.
            self.delayed_state.input.gather(amax(input.detach().reshape(-1, weight.shape[1])))
            self.delayed_state.weight.gather(amax(weight.detach()))
        return linear_cross_entropy(
            input,
            weight,
            targets,
            self.added_bias(),
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            reduction=self.reduction,
            z_loss=self.z_loss,
            chunk_tokens=self.chunk_tokens,
            recompute=self.recompute,
            plan=plan,
            cached_weight=operand,
        )

    def _check_recompute(self, recipe: Recipe) -> None:
        if recipe.linear.forward_draws and (self.recompute or self.reduction == "none"):
            found = "recompute=True" if self.recompute else "reduction='none'"
            raise ValueError(
                f"{called(self)}: {found} makes the logits again in the backward, and the recipe rounds input or weight"
                " stochastically, which would give others: use recompute=False and reduction='mean' or 'sum', or give"
                " the head another recipe by an override"
            )

    def _check_classes(self) -> None:
        shape = self.weight.shape
        if shape[0] != self.out_features:
            raise ValueError(
                f"{called(self)}: weight has shape {tuple(shape)}, and the head is one of out_features ="
                f" {self.out_features} classes: give it a weight [{self.out_features}, {self.in_features}], or set"
                f" its out_features to {shape[0]}"
            )

    def extra_repr(self) -> str:
        """As of `octavo.Linear`, and the reduction and chunk of its loss."""
        return f"{super().extra_repr()}, reduction={self.reduction}, chunk_tokens={self.chunk_tokens}"
