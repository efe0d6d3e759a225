"""FrozenGroupedLinear: the linear layers of several experts for serving, with E4M3 codes for their weights.

    y_e = (codes of x_e) (codes of w_e)^T * scales + b_e        x_e [m_e, K], w_e [N, K], y_e [m_e, N]

The bits are those of `octavo.GroupedLinear` with the same scales. State dict: `weight0`, `weight0_scale`, `bias0` and,
where activations are static, `expert0_input_scale`; as many of each other expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.functional.grouped_linear import GroupedCall, bounds_of, grouped_linear
from octavo.functional.grouped_on_device import DeviceCall, grouped_linear_on_device, unsupported_reasons
from octavo.functional.grouped_sizes import check_size_tensor, sizes_on_host
from octavo.inference.frozen_layer import FrozenLayer, Product
from octavo.inference.scheme import Scheme
from octavo.modules.fixed_product import refusing_gradient
from octavo.modules.given_input import check_input
from octavo.modules.grouped_linear import GroupedLinear
from octavo.modules.layernorm_linear import fp8_dtype


class FrozenGroupedLinear(FrozenLayer):
    """FP8 weights of several experts, FP8 activations, no training.

    Args:
        weights: high-precision values of each expert, [N, K].
        biases: of each, [N] or None.
        scheme: granularities, and whether activations are static.
        input_scales: of each expert's tokens, for a static scheme.
    """

    counted_class = GroupedLinear

    def __init__(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        scheme: Scheme,
        input_scales: Sequence[float | None],
    ) -> None:
        names = tuple(
            Product(f"weight{i}", f"weight{i}_scale", f"bias{i}", f"expert{i}_input_scale") for i in range(len(weights))
        )
        super().__init__(scheme, names)
        self.num_gemms = len(weights)
        self.out_features, self.in_features = weights[0].shape
        for product, weight, bias, scale in zip(names, weights, biases, input_scales, strict=True):
            self.hold(product, weight, bias, scale)

    def counted_parts(self) -> tuple[str, ...]:
        """Those of its experts."""
        return tuple(f".expert{number}" for number in range(self.num_gemms))

    def forward(self, x: Tensor, m_splits: Sequence[int] | Tensor, *, cached_weight: Any = None) -> Tensor:
        """y [..., out_features].

        Args:
            x, m_splits: as of `octavo.GroupedLinear`.
            cached_weight: as of `octavo.GroupedLinear`, whose place the layer takes; its codes are always kept.

        Raises:
            ValueError: shapes do not fit, sizes are no integers or do not sum to the tokens; or sizes that only the
                device knows, where there is no grouped product for the scheme.
        """
        check_input(x, self.in_features, self, "x")
        dtype = fp8_dtype(x)
        with torch.no_grad():
            rows = x.reshape(x.shape[:-1].numel(), self.in_features)
            if isinstance(m_splits, Tensor) and (m_splits.is_cuda or torch.compiler.is_compiling()):
                y = self._on_device(rows, m_splits, dtype)
            else:
                y = self._by_group(rows, self._checked(m_splits, rows.shape[0]), dtype)
            y = y.reshape(*x.shape[:-1], self.out_features)
        return refusing_gradient(x, y)

    def _checked(self, m_splits: Sequence[int] | Tensor, tokens: int) -> tuple[int, ...]:
        splits = sizes_on_host(m_splits, self.num_gemms, "experts")
        if sum(splits) != tokens:
            raise ValueError(
                f"m_splits {list(splits)} sums to {sum(splits)}, and x has {tokens} tokens: every token belongs to one"
                " expert"
            )
        return splits

    def _by_group(self, x: Tensor, splits: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self.is_blockwise:
            bounds = enumerate(bounds_of(splits))
            parts = [self.blockwise(i, x[start:stop], dtype, f".expert{i}") for i, (start, stop) in bounds]
            return torch.cat(parts)
        plans, operands, biases, codes = self._experts()
        return grouped_linear(x, codes, biases, GroupedCall(splits, plans, dtype, operands))

    def _on_device(self, x: Tensor, m_splits: Tensor, dtype: torch.dtype) -> Tensor:
        check_size_tensor(m_splits, self.num_gemms, x.device, "experts")
        features = self.in_features, self.out_features
        reasons = [f"scheme {self.scheme.name!r}"] if self.is_blockwise else []
        reasons = reasons or unsupported_reasons(x.device, dtype, self.plan(0), features)
        if reasons:
            raise ValueError(
                f"m_splits is on {x.device}, and there is no grouped product for {'; '.join(reasons)}. Give m_splits as"
                " a list (which waits for the device, if it comes from there)"
            )
        plans, operands, biases, codes = self._experts()
        return grouped_linear_on_device(x, m_splits, codes, biases, DeviceCall(plans, dtype, operands))

    def _experts(self) -> tuple[tuple[Any, ...], tuple[Any, ...], list[Any], list[Any]]:
        """(plans, operands of the weights, biases, codes)."""
        numbers = range(self.num_gemms)
        return (
            tuple(self.plan(number, f".expert{number}") for number in numbers),
            tuple(self.operand(number) for number in numbers),
            [self.bias_of(number) for number in numbers],
            [self.codes(number) for number in numbers],
        )

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return (
            f"num_gemms={self.num_gemms}, in_features={self.in_features}, out_features={self.out_features},"
            f" bias={self.bias_of(0) is not None}, scheme={self.scheme.name}"
        )
