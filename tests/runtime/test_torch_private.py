"""What the runtime takes from torch without a promise: each name pinned by what it must do."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor


def test_current_graph_task_id_tells_whether_a_backward_runs() -> None:
    ids: list[int] = []
    x = torch.ones((), requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: ids.append(torch._C._current_graph_task_id()))
    assert torch._C._current_graph_task_id() == -1
    y.backward()
    assert ids[0] != -1
    assert torch._C._current_graph_task_id() == -1


@pytest.mark.parametrize("reentrant", [True, False])
def test_top_saved_tensors_default_hooks_tells_the_recomputes_apart(reentrant: bool) -> None:
    """A non-reentrant recompute runs under saved-tensor hooks, a reentrant one without."""
    seen: list[bool] = []

    def function(x: Tensor) -> Tensor:
        seen.append(torch._C._autograd._top_saved_tensors_default_hooks(True) is not None)
        return x.sin()

    x = torch.ones(3, requires_grad=True)
    torch.utils.checkpoint.checkpoint(function, x, use_reentrant=reentrant).sum().backward()
    assert seen == [not reentrant, not reentrant]


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, private: bool) -> Tensor:
        out = x * 2
        return torch.ops.aten._unsafe_view.default(out, (3, 2)) if private else out.view(3, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.reshape(2, 3) * 2, None


def test_unsafe_view_out_of_a_function_can_be_changed_in_place() -> None:
    y = _Through.apply(torch.ones(2, 3, requires_grad=True), True)
    assert not y._is_view()
    y += 1
    y.sum().backward()


def test_tensor_data_bypasses_the_version_counter() -> None:
    x, factor = torch.ones((), requires_grad=True), torch.tensor(2.0)
    y = x * factor
    factor.data.copy_(torch.tensor(5.0))
    y.backward()
    assert x.grad.item() == 5.0
    z = x * factor
    factor.copy_(torch.tensor(7.0))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()


def test_dynamos_rule_for_side_effects_of_checkpoints_exists() -> None:
    import torch._dynamo

    assert torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint is False


def test_increment_version_counts_as_a_change() -> None:
    x = torch.ones(3)
    before = x._version
    torch.autograd.graph.increment_version([x])
    assert x._version == before + 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.autograd.graph.increment_version([])


def test_inference_tensors_have_no_version() -> None:
    with torch.inference_mode():
        x = torch.ones(3)
        with torch.inference_mode(False):
            y = torch.ones(3)
    assert (x.is_inference(), y.is_inference()) == (True, False)
    with pytest.raises(RuntimeError, match="do not track version"):
        x._version  # noqa: B018


def test_assume_constant_result_only_marks_the_function() -> None:
    def function() -> None:
        raise AssertionError("never called")

    assert torch.compiler.assume_constant_result(function) is function
    assert vars(function) == {"_dynamo_marked_constant": True}


def test_a_tensor_with_a_static_input_type_is_one_of_a_marked_static_address() -> None:
    """What `OperandState` sets itself, without an import of the compiler, is what torch's own function sets."""
    import torch._dynamo

    from octavo.tensor import OperandState

    marked = torch.ones(())
    torch._dynamo.mark_static_address(marked, guard=False)
    for late_bound in (False, True):
        state = OperandState(late_bound=late_bound)
        assert vars(state.gathered) == vars(marked)
        # A forward operand's scale is another tensor after each update.
        assert vars(state.scale) == (vars(marked) if late_bound else {})


def test_the_apply_below_function_apply_runs_a_function() -> None:
    """What `octavo.functional.linear` calls in eager code, where no transform of torch.func is active."""
    assert not torch._C._are_functorch_transforms_active()
    x = torch.ones(2, 3, requires_grad=True)
    assert torch._C._functorch.unwrap_if_dead(x) is x
    apply = super(torch.autograd.Function, _Through).apply
    y = apply(x, True)
    assert torch.equal(y, _Through.apply(x, True))
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.eq(2).all()


def test_transforms_of_torch_func_are_seen() -> None:
    seen: list[bool] = []

    def function(x: Tensor) -> Tensor:
        seen.append(torch._C._are_functorch_transforms_active())
        return x.sum()

    torch.func.grad(function)(torch.ones(3))
    assert seen == [True]


def test_the_level_of_forward_mode_and_what_has_a_tangent_there() -> None:
    from torch.autograd import forward_ad

    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    x = torch.ones(3)
    assert forward_ad._current_level == -1
    assert not wrapped(x)
    with forward_ad.dual_level():
        assert forward_ad._current_level == 0
        assert forward_ad.unpack_dual(x).tangent is None
        assert forward_ad.unpack_dual(forward_ad.make_dual(x, x)).tangent is not None
    seen: list[tuple[bool, int]] = []

    def function(y: Tensor) -> Tensor:
        seen.append((wrapped(y), forward_ad._current_level))
        return y

    torch.func.jvp(function, (x,), (x,))
    assert seen == [(True, 0)]
    assert forward_ad._current_level == -1


def test_the_sequence_number_counts_what_autograd_records_and_nothing_else() -> None:
    number = torch._C._autograd._get_sequence_nr
    x, before = torch.ones(3, requires_grad=True), number()
    with torch.no_grad():
        x.mul_(2)
    torch.ones(3) * 2
    x.detach()
    assert number() == before
    y = x * 2
    assert number() == before + 1
    y.sum().backward()
    assert number() == before + 2, "the sum alone"
