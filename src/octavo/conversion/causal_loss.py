"""The loss of transformers' language models in one read of the logits.

`ForCausalLMLoss` makes float32 of the logits, then log-probabilities, then a gradient of them: 12 bytes a logit beside
the two that are there. `octavo.functional.cross_entropy` computes the same in float32 from the logits as they are, and
keeps them alone. A model takes another loss under the name `_loss_function`, which is no part of its state dict.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from octavo.conversion.report import StructureReport
from octavo.functional.cross_entropy import cross_entropy
from octavo.kernels.cross_entropy import LOGIT_DTYPES
from octavo.kernels.triton_support import runs_compiled
from octavo.runtime.autocast import current_frame

_SLOT = "_loss_function"


def causal_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """transformers' `ForCausalLMLoss` -> [], float32; by one kernel where there is one and FP8 is on, else by itself.

    Args:
        logits: [..., S, V].
        labels: [..., S], the tokens themselves; those before the first are left out.
        vocab_size: V.
        num_items_in_batch: what the sum is divided by; None for the number of labels that count.
        ignore_index: labels that do not count.
        shift_labels: [..., S], the token that follows each; then `labels` is not looked at.
        kwargs: what else a model hands on.
    """
    if not (_has_kernel(logits) and _may_run(logits)):
        # Imported here: Dynamo traces that, and whose model this is has transformers.
        from transformers.loss.loss_utils import ForCausalLMLoss

        result: Tensor = ForCausalLMLoss(
            logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs
        )
        return result
    if shift_labels is None:
        assert labels is not None, "a model asks for a loss of labels"
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets = shift_labels.reshape(-1).to(logits.device)
    rows = logits.reshape(-1, vocab_size)
    if num_items_in_batch is None:
        return cross_entropy(rows, targets, ignore_index=ignore_index)
    loss = cross_entropy(rows, targets, ignore_index=ignore_index, reduction="sum")
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss / num_items_in_batch


def fuse_losses(model: nn.Module, wanted: bool, dry_run: bool) -> list[StructureReport]:
    """Have the language models in `model` compute their loss in one, or as they did before."""
    rows = []
    for name, module in _language_models(model):
        if not dry_run and wanted:
            module.__dict__[_SLOT] = causal_loss
        elif not dry_run:
            module.__dict__.pop(_SLOT, None)
        rows.append(StructureReport(name, type(module).__name__, ("loss",), wanted, "" if wanted else "fuse=False"))
    return rows


def unfuse_losses(model: nn.Module) -> None:
    """Give the language models in `model` their loss back."""
    for module in model.modules():
        if module.__dict__.get(_SLOT) is causal_loss:
            del module.__dict__[_SLOT]


def _language_models(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules whose forward asks for a loss, which is transformers' for language models or the one given here."""
    losses = sys.modules.get("transformers.loss.loss_utils")
    if losses is None:
        return
    for name, module in model.named_modules():
        kind, known = type(module), losses.ForCausalLMLoss
        if not isinstance(inspect.getattr_static(kind, "loss_function", None), property):
            continue
        names = getattr(getattr(inspect.unwrap(kind.forward), "__code__", None), "co_names", ())
        # (A type that transformers does not know stands for that of language models.)
        of_tokens = losses.LOSS_MAPPING.get(getattr(module, "loss_type", None), known) is known
        # One that somebody has set stays: an attribute, a module, or a method of a class of theirs.
        if "loss_function" in names and of_tokens and getattr(module, _SLOT, causal_loss) is causal_loss:
            yield name, module


def _has_kernel(logits: Tensor) -> bool:
    return logits.is_cuda and runs_compiled(logits.device.index)


def _may_run(logits: Tensor) -> bool:
    """True where the kernel does what is asked: plain logits, FP8 on, and no transform of torch.func around."""
    frame = current_frame()
    transformed = not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
    plain = type(logits) is Tensor and logits.dtype in LOGIT_DTYPES
    return plain and not transformed and (frame is None or frame.enabled)
