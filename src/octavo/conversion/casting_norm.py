"""The normalisation of somebody's model that casts its output ahead for the FP8 layers behind it.

A derived class in place, with the parameters it had. What it hands on is a normalised tensor like any other; the layers
behind it find the codes of that very tensor made (`octavo.functional.norm_ahead`). Wherever FP8 is off, the forward of
the class before runs.

Compiled code hands on no codes beside a tensor. On a GPU it runs the same kernels all the same, whose backward reads
everything once; on a CPU, and of wide rows, the compiler fuses the class before with what is around it. Where the
recipe keeps inputs in high precision a normalisation is made again in the backward; nothing but statistics is kept.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from octavo.conversion.converted import runs_plainly
from octavo.conversion.followers import Followers, PlainLayer
from octavo.conversion.known_parts import known_norm
from octavo.functional import normalise
from octavo.functional.norm_ahead import normalise_ahead
from octavo.kernels.triton_support import runs_compiled
from octavo.modules import OUT_DTYPES, FixedProduct
from octavo.modules.norm import handed_on_dtype
from octavo.runtime import LinearPlan, layer_call

# Under which name a normalisation knows the layers behind it, which are no children of it.
FOLLOWERS = "_layers_behind"
# Elements of the widest rows that compiled code normalises by Octavo's kernels. Measured on an H200, residuals in
# float32: of 1280 a step of ViT-Huge takes 5 % less than with the compiler's, whose backward reads everything three
# times; of 4096 Llama's takes as long, and keeps a sum of residuals that the compiler would make again.
_WIDEST = 2048


class CastingNorm(nn.Module):
    """What the derived classes of all normalisations share.

    Attributes:
        fused_from: the class that it was.
    """

    fused_from: ClassVar[type[nn.Module]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As before."""
        traced = torch.compiler.is_compiling()
        if len(args) != 1 or kwargs:
            return super().forward(*args, **kwargs)
        x, norm = args[0], known_norm(self, self.fused_from)
        # (Not known any more: whoever has replaced its forward calls this one.)
        followers = [] if norm is None else self._living_followers()
        plan = self._plan_of_what_follows(x, followers[0]) if followers else None
        if norm is None or plan is None:
            return super().forward(x)
        trains = torch.is_grad_enabled() and any(layer.weight.requires_grad for layer in followers)
        again = trains and plan.wgrad_fp8 and plan.keeps_input and not _is_exporting()
        if traced and not _has_kernels(x):
            return _made_again_but_sums(super().forward, x) if again else super().forward(x)
        weight: Any = self.weight
        bias: Any = getattr(self, "bias", None)
        through = norm.through(handed_on_dtype(x))
        if traced and again:
            return _made_again(x, through, weight, bias)
        if traced:
            return normalise(x, through, weight, bias)
        columnwise = trains and plan.wgrad_fp8 and not plan.keeps_input
        if not torch.is_inference_mode_enabled():
            return normalise_ahead(x, through, weight, bias, plan.input, columnwise)
        # A tensor of inference does not tell whether it was written to, so that nobody could take codes made ahead.
        with torch.inference_mode(False), torch.no_grad():
            return normalise_ahead(x, through, weight, bias, plan.input, columnwise)

    def _living_followers(self) -> list[PlainLayer]:
        """Those that are still there."""
        followers: Followers | None = self.__dict__.get(FOLLOWERS)
        return [] if followers is None else followers.layers()

    def _plan_of_what_follows(self, x: Any, first: PlainLayer) -> LinearPlan | None:
        """That of the first layer behind; None where the class before is to run."""
        weight: Any = self.weight
        if not isinstance(x, Tensor) or handed_on_dtype(x) not in OUT_DTYPES:
            return None
        # One without affine parameters has a shape all the same. What does not fit is told by the class before.
        shape = self.__dict__.get("normalized_shape") if weight is None else weight.shape
        if tuple(x.shape[-1:]) != tuple(shape or ()) or (weight is not None and not _hands_on_as_before(x, weight)):
            return None
        if not runs_plainly(first):
            return None
        plan = _plan_of(first, handed_on_dtype(x))
        if plan is None or torch.compiler.is_compiling():
            return plan
        origin = getattr(plan.input, "origin", None)
        # Whoever watches a quantizer is told of the cast by the layer.
        return None if origin is None or origin() is None else plan

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (self.fused_from,), self.__getstate__()


def _plan_of(layer: PlainLayer, dtype: torch.dtype) -> LinearPlan | None:
    """What a layer casts an input of this dtype with; None where FP8 is off."""
    if isinstance(layer, FixedProduct):
        product = layer.product(dtype)
        return None if product is None else product.plan
    call = layer_call(layer.delayed_state, layer.recipe, layer.layer_name)
    return None if call.recipe is None else layer.planned(call, layer.matrix())


_CLASSES: dict[type[nn.Module], type[CastingNorm]] = {}


def casting_class(kind: type[nn.Module]) -> type[CastingNorm]:
    """The class that a normalisation of class `kind` becomes."""
    if kind not in _CLASSES:
        # Of the same name: blocks and normalisations are also looked for by the names of their classes.
        namespace = {
            "__doc__": f"{kind.__name__} that casts its output ahead to FP8.",
            "__qualname__": kind.__qualname__,
            "fused_from": kind,
        }
        _CLASSES[kind] = type(kind.__name__, (CastingNorm, kind), namespace)
    return _CLASSES[kind]


def _has_kernels(x: Any) -> bool:
    """True if code that is being traced normalises rows of x by kernels, forward and backward."""
    return isinstance(x, Tensor) and x.is_cuda and runs_compiled(x.device.index) and 1 < x.shape[-1] <= _WIDEST


def _is_exporting() -> bool:
    """True while code is traced for `torch.export`, which has no checkpoints."""
    # `torch.compiler.is_exporting` is True in all code that torch 2.11 traces.
    return torch.compiler._is_exporting_flag


def _made_again(*arguments: Any) -> Any:
    """`normalise` whose result traced code makes again in the backward; by itself it keeps what a kernel reads."""
    return checkpoint(normalise, *arguments, use_reentrant=False, **_POLICY)


# torch 2.11 forgets that operators of an autograd function are a checkpoint's, unless a policy says it of each of them
# (and logs once that policies are experimental).
_MUST = functools.partial(create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_RECOMPUTE)
_POLICY: dict[str, Any] = {"context_fn": _MUST} if torch.__version__ < "2.13" else {}


def _made_again_but_sums(forward: Any, x: Tensor) -> Any:
    """What the class before makes of x in traced code, made again in the backward, but for sums over a row.

    Those take four bytes a row, and added in another order they would not be the same.
    """
    return checkpoint(forward, x, use_reentrant=False, context_fn=_BUT_SUMS)


def _but_sums(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_SAVE if operator in _WITH_SUMS else CheckpointPolicy.MUST_RECOMPUTE


_BUT_SUMS = functools.partial(create_selective_checkpoint_contexts, _but_sums)
# Whether these are kept the compiler decides: it keeps what is much smaller than what it is made of.
_WITH_SUMS = (torch.ops.aten.mean.dim, torch.ops.aten.native_layer_norm.default, torch.ops.aten._fused_rms_norm.default)


def _hands_on_as_before(x: Tensor, weight: Any) -> bool:
    """True unless the class before would hand on a wider dtype to whoever takes it."""
    return weight.dtype == x.dtype or torch.is_autocast_enabled(x.device.type)


def _rebuild(kind: type[nn.Module]) -> nn.Module:
    return nn.Module.__new__(casting_class(kind))
