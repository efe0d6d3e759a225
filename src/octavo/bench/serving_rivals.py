"""A model served in every hand: in 16 bits, by Octavo frozen or as converted, by torchao, by Transformer Engine.

Frozen, weights are FP8 codes. A converted model is one as it stands after training: weights in BF16, cast in every
call, so that only long prompts gain. In both, norms and MLPs run as one with the casts behind them; the peers' layers
run one by one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from octavo.bench.peers import Context, peer_reason, serve_with_te, serve_with_torchao
from octavo.bench.rivals import octavo_recipes
from octavo.bench.serving_floors import Cost
from octavo.bench.variants import HEAD_PATTERN
from octavo.conversion import convert
from octavo.conversion.converted import is_conv1d
from octavo.inference import FrozenLinear, calibrate, freeze
from octavo.runtime import update_scales

# What the record calls Octavo's schemes.
SCHEMES = {"rowwise": "row", "tensor_static": "tensor_static", "tensor_dynamic": "tensor_dynamic"}
CONVERTED = "converted"
# Bytes: 2 read, twice where a scale is measured, and 1 written.
_MEASURED = Cost(activation=5, weight_bits=8)
# What computes an activation writes its codes; or its values and their amax, which one cast then reads.
_FUSED, _FUSED_MEASURED = Cost(activation=1, weight_bits=8), Cost(activation=3, weight_bits=8)
_FUSED_CONVERTED = Cost(activation=1, weight=3)


class Served(NamedTuple):
    """A model ready to be asked: how many of its layers run in FP8, and what surrounds a forward."""

    model: Any
    layers: int
    context: Context = nullcontext


@dataclass(frozen=True)
class ServingRival:
    """One way to serve a model.

    Attributes:
        key: its name in the record.
        library: "torch", "octavo", "torchao" or "te".
        recipe: of the library; "" for none.
        products: whose ceiling its linear layers have: "bf16" (both 16-bit forms), "tensor" or "row".
        cost: of its casts, and what its weights are kept in.
        serve: of a model in BF16, which stays as it is, and of prompts int64 [B, S] to calibrate with.
        reason: why it is not measured here, or None.
        decodes: whether it is asked for single tokens, and loaded from a file.
    """

    key: str
    library: str
    recipe: str
    products: str
    cost: Cost
    serve: Callable[[nn.Module, Tensor], Served]
    reason: str | None = None
    decodes: bool = True


def serving_rivals(device: torch.device) -> list[ServingRival]:
    """Who is measured, in this order, so that a time limit leaves out what says least."""
    torchao, te = (peer_reason(library, device) for library in ("torchao", "te"))
    of, plain = ServingRival, Cost()
    return [
        of("bf16", "torch", "", "bf16", plain, _as_it_is),
        of("octavo-rowwise", "octavo", "rowwise", "row", _FUSED, _frozen("rowwise")),
        of("octavo-tensor_static", "octavo", "tensor_static", "tensor", _FUSED, _frozen("tensor_static")),
        of("fp16", "torch", "", "bf16", plain, _in_fp16),
        of(
            "octavo-delayed-converted",
            "octavo",
            "delayed",
            "tensor",
            _FUSED_CONVERTED,
            _converted("delayed"),
            None,
            False,
        ),
        of("octavo-tensor_dynamic", "octavo", "tensor_dynamic", "tensor", _FUSED_MEASURED, _frozen("tensor_dynamic")),
        of(
            "octavo-rowwise-converted", "octavo", "rowwise", "row", _FUSED_CONVERTED, _converted("rowwise"), None, False
        ),
        of("torchao-rowwise", "torchao", "rowwise", "row", _MEASURED, _torchao("rowwise"), torchao),
        of("torchao-tensorwise", "torchao", "tensorwise", "tensor", _MEASURED, _torchao("tensorwise"), torchao),
        of("te-current", "te", "current", "tensor", _MEASURED, _te("current"), te),
    ]


def _as_it_is(model: nn.Module, prompts: Tensor) -> Served:
    return Served(model, 0)


def _in_fp16(model: nn.Module, prompts: Tensor) -> Served:
    """Parameters in half precision; frequencies of rotary embeddings are buffers, and stay in float32."""
    served = copy.deepcopy(model)
    for parameter in served.parameters():
        parameter.data = parameter.data.half()
    return Served(served, 0)


def _frozen(recipe: str) -> Callable[[nn.Module, Tensor], Served]:
    scheme = SCHEMES[recipe]

    def serve(model: nn.Module, prompts: Tensor) -> Served:
        served, scales = copy.deepcopy(model), None
        if scheme == "tensor_static":
            scales = calibrate(served, [_prompt(prompts)])
        layers = freeze(served, scheme, input_scales=scales, exclude=[HEAD_PATTERN] if _has_untied_head(served) else [])
        return _counted(Served(served, len(layers)), "Octavo")

    return serve


def _converted(recipe: str) -> Callable[[nn.Module, Tensor], Served]:
    def serve(model: nn.Module, prompts: Tensor) -> Served:
        served = copy.deepcopy(model)
        layers = len(convert(served, octavo_recipes()[recipe], exclude=[HEAD_PATTERN], filter="all").converted)
        _train_scales(served, prompts)
        return _counted(Served(served, layers), "Octavo")

    return serve


def _train_scales(model: nn.Module, prompts: Tensor) -> None:
    """Delayed scaling's scales of the forward become those of the prompts, as a step of training leaves them."""
    model.train().requires_grad_(True)
    with torch.enable_grad():
        model(**_prompt(prompts))
    update_scales(model)
    model.eval().requires_grad_(False)


def _prompt(prompts: Tensor) -> dict[str, Any]:
    """Of a forward without a cache."""
    return {"input_ids": prompts, "use_cache": False, "logits_to_keep": 1}


def _has_untied_head(model: Any) -> bool:
    """A head that shares the embedding's weight stays as it is by itself."""
    return model.get_output_embeddings().weight is not model.get_input_embeddings().weight


def _torchao(recipe: str) -> Callable[[nn.Module, Tensor], Served]:
    def serve(model: nn.Module, prompts: Tensor) -> Served:
        served = with_linears(copy.deepcopy(model))
        return _counted(Served(served, serve_with_torchao(served, recipe)), "torchao")

    return serve


def _te(recipe: str) -> Callable[[nn.Module, Tensor], Served]:
    def serve(model: nn.Module, prompts: Tensor) -> Served:
        served = with_linears(copy.deepcopy(model))
        layers, context = serve_with_te(served, recipe)
        return _counted(Served(served, layers, context), "Transformer Engine")

    return serve


def _counted(served: Served, whose: str) -> Served:
    if not served.layers:
        raise ValueError(f"{whose} takes no layer of this model: it would be measured in bf16")
    return served


def with_linears(model: nn.Module) -> nn.Module:
    """The model, a Linear in the place of each Conv1D of transformers, in place: the peers know no other layer."""
    for name, module in list(model.named_modules()):
        if is_conv1d(module):
            conv: Any = module
            owner, _, own = name.rpartition(".")
            inputs, outputs = conv.weight.shape
            linear = nn.Linear(inputs, outputs, device=conv.weight.device, dtype=conv.weight.dtype)
            with torch.no_grad():
                linear.weight.copy_(conv.weight.t())
                linear.bias.copy_(conv.bias)
            setattr(model.get_submodule(owner), own, linear)
    return model


def linear_shapes(model: Any) -> list[tuple[int, int]]:
    """(K, N) of each linear layer but the head."""
    head = model.get_output_embeddings()
    found = []
    for module in model.modules():
        if is_conv1d(module):
            conv: Any = module
            found.append((int(conv.weight.shape[0]), int(conv.weight.shape[1])))
        elif isinstance(module, nn.Linear) and module is not head:
            found.append((module.in_features, module.out_features))
    return found


def is_native(model: nn.Module) -> bool | None:
    """Whether all frozen layers of a model run on FP8 units; None without one."""
    frozen = [module for module in model.modules() if isinstance(module, FrozenLinear)]
    return all(module.is_native for module in frozen) if frozen else None


def model_bytes(model: nn.Module) -> int:
    """Bytes of parameters and buffers, shared ones once; of wrapped tensors, of what is inside."""
    tensors = {id(one): one for one in (*model.parameters(), *model.buffers())}
    return sum(_bytes(tensor) for tensor in tensors.values())


def _bytes(tensor: Any) -> int:
    if is_traceable_wrapper_subclass(tensor):
        inner, _ = tensor.__tensor_flatten__()
        return sum(_bytes(getattr(tensor, name)) for name in inner)
    return int(tensor.numel() * tensor.element_size())
