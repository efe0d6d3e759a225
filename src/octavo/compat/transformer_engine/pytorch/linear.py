"""`te.Linear`: `octavo.Linear` with Transformer Engine's signature, initialisation and attributes.

Source: transformer_engine/pytorch/module/linear.py of Transformer Engine 2.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from octavo.compat.planned import refuse
from octavo.compat.transformer_engine.pytorch.main_grad import into_main_grad
from octavo.compat.transformer_engine.pytorch.scaling_views import fp8_meta
from octavo.modules import CachedWeight
from octavo.modules import Linear as OctavoLinear
from octavo.tensor import QuantizedTensor

# What is_first_microbatch means to octavo.Linear.
_CACHE: dict[bool | None, CachedWeight | None] = {None: None, True: "refresh", False: "reuse"}
_INIT_STD = 0.023


class Linear(OctavoLinear):
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
        _refuse_ranks(tp_group, tp_size, parallel_mode)
        _refuse_planned(
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
        self._init_method = init_method or functools.partial(nn.init.normal_, mean=0.0, std=_INIT_STD)
        self._rng_tracker = get_rng_state_tracker, rng_tracker_name
        super().__init__(in_features, out_features, self.use_bias, _placed(device), params_dtype)
        self.layer_name = name
        if parameters_split is not None:
            self._split(_part_sizes(parameters_split, out_features))

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Draw the parameters anew, unless `defer_init`."""
        if defer_init:
            return
        tracker, name = self._rng_tracker
        fork = nullcontext() if tracker is None else tracker().fork(*[name] if name else [])
        with fork, torch.no_grad():
            self._init_method(self.weight)
            if self.bias is not None:
                self.bias.zero_()

    def forward(  # type: ignore[override]
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """y = x w^T + b -> [..., out_features]; with `return_bias`, (x w^T, b).

        Args:
            inp: [..., in_features].
            is_first_microbatch: None quantizes the weight in every call, True quantizes and keeps the codes, False
                takes the kept ones as long as the weight is the same.
            fp8_output, fp8_grad: not built.
        """
        if fp8_output or fp8_grad:
            _refuse_planned(fp8_output=fp8_output, fp8_grad=fp8_grad)
        if is_first_microbatch not in (None, True, False):
            raise ValueError(f"is_first_microbatch is {is_first_microbatch!r}: expected None, True or False")
        out = self.run(inp, _CACHE[is_first_microbatch])
        if self.return_bias:
            return out, None if self.bias is None else self.bias.to(out.dtype)
        return out

    def matrix(self) -> Tensor:
        """The weight [out, in], on its way to `main_grad` if that is where its gradient goes."""
        weight = super().matrix()
        return into_main_grad(weight) if self.fuse_wgrad_accumulation and torch.is_grad_enabled() else weight

    def added_bias(self) -> Tensor | None:
        """None with `return_bias`."""
        return self.bias if self.apply_bias else None

    @property
    def fp8_meta(self) -> dict[str, Any]:
        """Histories and scales in TE's layout: `fp8_meta["scaling_fwd"].scale` and the like; copies."""
        return fp8_meta(self.delayed_state)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        # TE's own FP8 state, a pickle in a tensor: accepted and left alone. Scales come from the weights and the batch.
        state_dict.pop(f"{prefix}_extra_state", None)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

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


def _part_sizes(split: Iterable[str] | Mapping[str, int], out_features: int) -> dict[str, int]:
    """{prefix of the parameters' names: features}."""
    if isinstance(split, Mapping):
        sizes = dict(split)
    else:
        names = list(split)
        if not names or out_features % len(names):
            raise ValueError(
                f"parameters_split has {len(names)} names: out_features = {out_features} must be a multiple of that"
            )
        sizes = dict.fromkeys(names, out_features // len(names))
    prefixes = {f"{name.rstrip('_')}_": size for name, size in sizes.items()}
    if sum(prefixes.values()) != out_features or min(prefixes.values()) <= 0:
        raise ValueError(f"parameters_split is {sizes}: positive sizes must add up to out_features = {out_features}")
    return prefixes


def _refuse_ranks(tp_group: Any | None, tp_size: int, parallel_mode: str | None) -> None:
    if parallel_mode not in (None, "row", "column"):
        raise ValueError(f"parallel_mode is {parallel_mode!r}: expected None, 'row' or 'column'")
    size = tp_size if tp_group is None else tp_group.size()
    if size > 1:
        refuse(f"te.Linear with a tensor-parallel group of {size} ranks (tp_size, tp_group)")


def _refuse_planned(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value:
            refuse(f"te.Linear({name}={value!r})")


class _Warned:
    no_gpu = False


def _placed(device: torch.device | str) -> torch.device:
    """The device asked for, or the CPU in place of CUDA where there is none."""
    wanted = torch.device(device)
    if wanted.type != "cuda" or torch.cuda.is_available():
        return wanted
    if not _Warned.no_gpu:
        _Warned.no_gpu = True
        warnings.warn(
            "no CUDA device: Transformer Engine's layers stand on the CPU, where FP8 is emulated", stacklevel=3
        )
    return torch.device("cpu")


__all__ = ["Linear", "SplitLinear"]
