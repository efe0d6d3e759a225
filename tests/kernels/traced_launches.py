"""Graphs with Octavo's Triton kernels in them, traced, worked on by Inductor's passes and run where there is no GPU.

The kernels' operators are taken for any device, a stand-in of Triton's driver answers what the compiler asks it, and a
launch is run by the reference of its kernel, on the very arguments that the kernel would get.
"""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import min_cut_rematerialization_partition as _partitioned
from torch._higher_order_ops.triton_kernel_wrap import (
    kernel_side_table,
    triton_kernel_wrapper_functional,
    triton_kernel_wrapper_mutation,
)
from torch._inductor.compile_fx import _recursive_joint_graph_passes
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.virtualized import V
from triton.backends.compiler import GPUTarget

from octavo.formats import E4M3, E5M2
from octavo.kernels.amax import amax_reference
from octavo.kernels.block_cast import block_cast_reference
from octavo.kernels.block_cast.compiled import block_cast_inductor
from octavo.kernels.cast_transpose import CastOutput, ScaleRule, cast_transpose_reference
from octavo.kernels.compiled import cast_transpose_inductor, partial_amax_inductor
from octavo.kernels.known_writes import unwrapped
from octavo.scaling import BLOCK_1X128, BLOCK_128X128, TENSOR

LAUNCHES = (triton_kernel_wrapper_functional, triton_kernel_wrapper_mutation)


class _Driver:
    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def take_kernels_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have traced casts be those of a GPU, whatever the device."""
    monkeypatch.setattr(triton.runtime.driver, "_active", _Driver())
    for name, compiled in (("cast_transpose", _cast), ("block_cast", _block_cast)):
        monkeypatch.setattr(importlib.import_module(f"octavo.kernels.{name}"), "_compiled", compiled)
    amaxes = importlib.import_module("octavo.kernels.amax")
    monkeypatch.setattr(amaxes, "_compiled_partial", lambda x: partial_amax_inductor(x))


def _cast(x: Tensor, format: Any, rowwise: Any, columnwise: Any, rule: Any, gathered: Any, *flags: bool) -> CastOutput:
    epsilon, power_of_two = (None, False) if rule is None else rule[:2]
    shared = rowwise is columnwise
    codes, scale, codes_t, scale_t, sums = cast_transpose_inductor(
        x, format.name, rowwise, columnwise, epsilon, power_of_two, gathered, *flags, shared
    )
    return CastOutput(
        None if rowwise is None else codes,
        None if rowwise is None else scale,
        None if columnwise is None else codes_t,
        None if columnwise is None else scale if shared else scale_t,
        sums if flags[1] else None,
    )


def _block_cast(x: Tensor, format: Any, granularity: Any, rule: Any, *flags: bool) -> CastOutput:
    outputs = block_cast_inductor(x, format.name, granularity.name, *rule, *flags)
    wanted = (flags[0], flags[0], flags[1], flags[1], flags[3])
    return CastOutput(*(out if want else None for out, want in zip(outputs, wanted, strict=True)))


class Compiled:
    """A backend of torch.compile: Inductor's graphs, run node by node.

    Attributes:
        launches: how often each kernel and operator of Octavo stands in the graphs so far.
        clones: how many launches have their memory copied first.
        kept_codes: bytes of codes that forwards keep for their backwards.
        graphs: how many forwards were compiled. (Dynamo may begin anew, and then asks for one more than it takes.)
    """

    def __init__(self) -> None:
        self.launches: Counter[str] = Counter()
        self.clones = self.kept_codes = self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        return aot_module_simplified(
            graph,
            inputs,
            fw_compiler=lambda graph, _: self._finished(graph, False, True),
            bw_compiler=lambda graph, _: self._finished(graph, False, False),
            inference_compiler=lambda graph, _: self._finished(_worked_on(graph), True, False),
            partition_fn=lambda graph, inputs, **options: _partitioned(_worked_on(graph), inputs, **options),
            # As Inductor asks for.
            keep_inference_input_mutations=True,
            decompositions=select_decomp_table(),
        )

    def _finished(self, graph: torch.fx.GraphModule, inference: bool, keeps: bool) -> Any:
        self.graphs += keeps or inference
        if keeps:
            values = (node.meta["val"] for node in graph.graph.output_node().all_input_nodes)
            kept = (one for one in values if isinstance(one, Tensor) and one.dtype.itemsize == 1)
            # Of a size that is not known yet the bytes are not either.
            self.kept_codes += sum(math.prod(one.shape) for one in kept if all(type(n) is int for n in one.shape))
        with V.set_fake_mode(_fake_mode(graph)):
            post_grad_passes(graph, inference)
        for node in graph.graph.nodes:
            if node.target in LAUNCHES:
                self.launches[_name(node.kwargs["kernel_idx"])] += 1
            elif getattr(node.target, "namespace", None) == "octavo":
                self.launches[node.target._opname] += 1
            self.clones += node.target in (torch.ops.aten.clone.default, torch.ops.aten.as_strided.default)
        run = _ByReference(graph)

        def boxed(arguments: list[Any]) -> Any:
            result = run.run(*arguments)
            arguments.clear()
            return result

        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed


def _worked_on(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    with V.set_fake_mode(_fake_mode(graph)):
        return _recursive_joint_graph_passes(graph)


def _fake_mode(graph: torch.fx.GraphModule) -> Any:
    values = (node.meta.get("val") for node in graph.graph.nodes)
    return next(value.fake_mode for value in values if isinstance(value, Tensor))


def _name(index: int) -> str:
    name: str = unwrapped(kernel_side_table.get_kernel(index))[0].fn.__name__
    return name


class _ByReference(torch.fx.Interpreter):
    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.aten._foreach_copy_.default:
            # In Inductor's hands it returns what it wrote to.
            target(*args, **kwargs)
            return args[0]
        if target is not triton_kernel_wrapper_mutation:
            return super().call_function(target, args, kwargs)
        _RUN[_name(kwargs["kernel_idx"])](**kwargs["kwargs"])
        return None


def _run_partial_amax(x: Tensor, out: Tensor, **_: Any) -> None:
    out.fill_(amax_reference(x, TENSOR))


def _run_join_sums(sums: Tensor, out: Tensor, **_: Any) -> None:
    out.copy_(sums.view(-1, out.numel()).sum(0))


def _run_cast(**of: Any) -> None:
    rule = ScaleRule(float(of["EPSILON"]).hex(), of["POWER_OF_TWO"]) if of["FROM_AMAX"] else None
    rowwise = of["rowwise"] if of["HAS_CODES"] else None
    columnwise = of["columnwise"] if of["HAS_CODES_T"] else None
    outputs = cast_transpose_reference(
        of["x"],
        E4M3 if of["FORMAT_MAX"] == E4M3.max else E5M2,
        rowwise,
        rowwise if of["SHARED"] else columnwise,
        rule,
        of["gathered"] if of["GATHER"] else None,
        of["INF_TO_NAN"],
        of["COLUMN_SUM"],
    )
    _hand_over(outputs, of)


def _run_block_cast(**of: Any) -> None:
    granularity = BLOCK_128X128 if of["SQUARE"] else BLOCK_1X128
    rule = ScaleRule(float(of["EPSILON"]).hex(), of["POWER_OF_TWO"])
    format = E4M3 if of["FORMAT_MAX"] == E4M3.max else E5M2
    flags = (of["HAS_CODES"], of["HAS_CODES_T"], of["INF_TO_NAN"], of["COLUMN_SUM"])
    _hand_over(block_cast_reference(of["x"], format, granularity, rule, *flags), of)


def _hand_over(outputs: tuple[Tensor | None, ...], of: dict[str, Any]) -> None:
    for name, made in zip(("codes", "scale", "codes_t", "scale_t"), outputs, strict=False):
        if made is not None:
            of[name].copy_(made.reshape(of[name].shape))
    if outputs[4] is not None:
        # The first part is all of it.
        of["sums"].zero_()[: outputs[4].numel()] = outputs[4]


_RUN: dict[str, Callable[..., None]] = {
    "partial_amax_kernel": _run_partial_amax,
    "join_sums_kernel": _run_join_sums,
    "cast_transpose_kernel": _run_cast,
    "block_cast_kernel": _run_block_cast,
    "packed_block_cast_kernel": _run_block_cast,
}
