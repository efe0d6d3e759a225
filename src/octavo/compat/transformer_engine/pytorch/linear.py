"""`te.Linear`: `octavo.Linear` with Transformer Engine's signature, initialisation and attributes.

Source: transformer_engine/pytorch/module/linear.py of Transformer Engine 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from octavo.compat.planned import refuse
from octavo.compat.transformer_engine.pytorch.construction import (
    Drawing,
    cached_weight_of,
    part_sizes,
    placed,
    refuse_planned,
    refuse_ranks,
)
from octavo.compat.transformer_engine.pytorch.one_product import OneProduct
from octavo.modules import CachedWeight
from octavo.modules import Linear as OctavoLinear
from octavo.tensor import QuantizedTensor


class Linear(OneProduct, OctavoLinear):
    """y = x w^T + b with TE's arguments, in FP8 inside `te.autocast`.

    Args:
        in_features, out_features, bias: as `nn.Linear`.
        sequence_parallel: changes nothing without a tensor-parallel group.
        fuse_wgrad_accumulation: the weight's gradient is added to `weight.main_grad` instead of `weight.grad`.
        tp_group, tp_size: more than one rank is not built.
        get_rng_state_tracker, rng_tracker_name: weights are drawn inside `get_rng_state_tracker().fork(name)`.
        init_method: fills the weight in place; normal(0, 0.023) if None. The bias begins at zero.
        return_bias: the bias is not added but returned: (output, bias).
        params_dtype: of the parameters; torch's default dtype if None.
        parallel_mode: None, "row" or "column"; changes nothing with one rank.
        parameters_split: names of equal parts of the output features, or a mapping of names to sizes; each part has
            parameters of its own, `<name>_weight` and `<name>_bias`.
        device: "cuda" falls back to the CPU where there is no GPU, with one warning.
        name: of the layer, for recipes with overrides and for `octavo.count_gemms`.

    Raises:
        NotImplementedError: names the argument that is not built.
        ValueError: parts do not add up, or an unknown parallel_mode.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Iterable[str] | Mapping[str, int] | None = None,
        device: torch.device | str = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
        rng_tracker_name: str | None = None,
    ) -> None:
        refuse_ranks("Linear", tp_group, tp_size, parallel_mode)
        refuse_planned(
            "Linear",
            ub_overlap_ag=ub_overlap_ag,
            ub_overlap_rs=ub_overlap_rs,
            ub_overlap_rs_dgrad=ub_overlap_rs_dgrad,
            ub_bulk_dgrad=ub_bulk_dgrad,
            ub_bulk_wgrad=ub_bulk_wgrad,
            ub_name=ub_name,
            delay_wgrad_compute=delay_wgrad_compute,
            symmetric_ar_type=symmetric_ar_type,
            save_original_input=save_original_input,
        )
        self.sequence_parallel = bool(sequence_parallel)
        self.fuse_wgrad_accumulation = bool(fuse_wgrad_accumulation)
        self.use_bias = bool(bias)
        self.return_bias = bool(return_bias)
        self.apply_bias = self.use_bias and not self.return_bias
        self.parallel_mode, self.tp_size = parallel_mode, 1
        self._drawing = Drawing(init_method, get_rng_state_tracker, rng_tracker_name)
        super().__init__(in_features, out_features, self.use_bias, placed(device), params_dtype)
        self.layer_name = name
        if parameters_split is not None:
            self._split(part_sizes(parameters_split, out_features))

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Draw the parameters anew, unless `defer_init`."""
        if defer_init:
            return
        self._drawing.fill([self.weight], [self.bias])

    def forward(  # type: ignore[override]
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
        *,
        cached_weight: CachedWeight | None = None,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """y = x w^T + b -> [..., out_features]; with `return_bias`, (x w^T, b).

        Args:
            inp: [..., in_features].
            is_first_microbatch: None quantizes the weight in every call, True quantizes and keeps the codes, False
                takes the kept ones as long as the weight is the same.
            fp8_output, fp8_grad: not built.
            cached_weight: the same as is_first_microbatch, as `octavo.Linear` has it.
        """
        if fp8_output or fp8_grad:
            refuse_planned("Linear", fp8_output=fp8_output, fp8_grad=fp8_grad)
        out = self.run(inp, cached_weight_of(is_first_microbatch, cached_weight))
        if self.return_bias:
            return out, None if self.bias is None else self.bias.to(out.dtype)
        return out

    def _split(self, sizes: dict[str, int]) -> None:
        if self.fuse_wgrad_accumulation:
            refuse("te.Linear(parameters_split=..., fuse_wgrad_accumulation=True)")
        if isinstance(self.weight, QuantizedTensor):
            refuse("te.Linear(parameters_split=...) inside quantized_model_init")
        whole = {name: self._parameters.pop(name) for name in ("weight", "bias")}
        for kind, parameter in whole.items():
            if parameter is not None:
                parts = parameter.detach().split(list(sizes.values()))
                for name, part in zip(sizes, parts, strict=True):
                    self.register_parameter(f"{name}{kind}", nn.Parameter(part.clone()))
        self.part_names = tuple(sizes)
        self.__class__ = SplitLinear


class SplitLinear(Linear):
    """`te.Linear` whose output features belong to several parameters; made by `parameters_split`.

    The weight is put together in every call, so codes kept by `is_first_microbatch` are made anew each time.
    """

    part_names: tuple[str, ...]

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """All weights as one [out, in]."""
        return torch.cat([self._part(name, "weight") for name in self.part_names])

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        """All biases as one [out]."""
        return torch.cat([self._part(name, "bias") for name in self.part_names]) if self.use_bias else None

    def _part(self, name: str, kind: str) -> Tensor:
        part: Tensor = getattr(self, f"{name}{kind}")
        return part


__all__ = ["Linear", "SplitLinear"]
