"""The loss of transformers' language models, fused: the same numbers, the same model, and the way back."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from tests.conversion.known_models import gpt2, llama, vit
from torch import Tensor, nn

import octavo
from octavo.conversion import causal_loss as fused
from octavo.recipes import CurrentScaling

loss_utils = pytest.importorskip("transformers.loss.loss_utils")

CLASSES = 37


@pytest.fixture
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the way of a GPU, where the references of its kernels run."""
    monkeypatch.setattr(fused, "_has_kernel", lambda logits: True)


def data(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    logits = (4 * torch.randn(3, 11, CLASSES)).to(dtype).requires_grad_()
    labels = torch.randint(0, CLASSES, (3, 11))
    labels[0, 4:] = -100
    return logits, labels


OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "of the whole batch": {"num_items_in_batch": 80},
    "of the whole batch, on a device": {"num_items_in_batch": torch.tensor(80)},
    "shifted before": {"shift_labels": torch.arange(33).reshape(3, 11) % CLASSES},
    "another index": {"ignore_index": 5},
    "what else a model hands on": {"output_router_logits": False},
}


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_loss_and_gradient_are_those_of_transformers(options: dict[str, Any], dtype: torch.dtype) -> None:
    logits, labels = data(dtype)
    if "ignore_index" in options:
        labels[labels == -100] = 5
    found = fused.causal_loss(logits, labels, CLASSES, **options)
    (gradient,) = torch.autograd.grad(found, logits)
    expected = loss_utils.ForCausalLMLoss(logits, labels, CLASSES, **options)
    (wanted,) = torch.autograd.grad(expected, logits)
    assert found.dtype == expected.dtype == torch.float32
    # Both compute in float32: sums of 37 exponentials, then of 33 rows.
    torch.testing.assert_close(found, expected, rtol=64 * 2.0**-24, atol=0.0)
    # Both round the gradient once; where they differ before that, by one step of the dtype.
    step = torch.finfo(dtype).eps + 64 * 2.0**-24
    assert ((gradient - wanted).abs() <= step * wanted.abs() + 1e-8).all()


@pytest.mark.usefixtures("_kernels")
def test_logits_that_are_a_part_of_others() -> None:
    logits, labels = data(torch.bfloat16)
    found = fused.causal_loss(logits[:, 3:], labels[:, 3:], CLASSES)
    (gradient,) = torch.autograd.grad(found, logits)
    assert not gradient[:, :3].any()
    expected = loss_utils.ForCausalLMLoss(logits[:, 3:], labels[:, 3:], CLASSES)
    torch.testing.assert_close(found, expected, rtol=64 * 2.0**-24, atol=0.0)


def test_without_kernels_it_is_that_of_transformers_to_the_bit() -> None:
    logits, labels = data(torch.bfloat16)
    found = fused.causal_loss(logits, labels, CLASSES)
    assert torch.equal(found, loss_utils.ForCausalLMLoss(logits, labels, CLASSES))


def step(model: Any, tokens: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("build", [llama, gpt2])
def test_a_model_takes_it_and_gives_it_back(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = build(1).train()
    keys = list(model.state_dict())
    tokens = torch.randint(0, model.config.vocab_size, (2, 16))
    report = octavo.convert(model, CurrentScaling(), dry_run=True)
    assert "_loss_function" not in model.__dict__
    assert report.structures[-1].parts == ("loss",)
    assert report.structures[-1].fused
    report = octavo.convert(model, CurrentScaling())
    assert f"fused: the loss of {type(model).__name__}, on a GPU (root)" in str(report)
    assert model.loss_function is fused.causal_loss
    assert list(model.state_dict()) == keys
    plain = step(model, tokens)
    monkeypatch.setattr(fused, "_has_kernel", lambda logits: True)
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert one.loss_function is fused.causal_loss
        # The gradient of the loss may be rounded to another neighbour, and its codes in FP8 with it.
        loss, *_ = step(one, tokens)
        torch.testing.assert_close(loss, plain[0], rtol=1e-6, atol=0.0)
    unfused = octavo.convert(model, CurrentScaling(), fuse=False)
    assert model.loss_function is loss_utils.ForCausalLMLoss
    assert (unfused.structures[-1].fused, unfused.structures[-1].reason) == (False, "fuse=False")
    octavo.convert(model, CurrentScaling())
    octavo.unconvert(model)
    assert model.loss_function is loss_utils.ForCausalLMLoss


def test_a_loss_of_the_users_and_other_models_are_left_alone() -> None:
    def own(*args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros(())

    model = llama(1)
    model.loss_function = own
    report = octavo.convert(model, CurrentScaling())
    assert model.loss_function is own
    assert all(one.parts != ("loss",) for one in report.structures)
    octavo.unconvert(model)
    assert model.loss_function is own
    # transformers' own, but set by hand.
    model = llama(1)
    model.loss_function = loss_utils.ForCausalLMLoss
    octavo.convert(model, CurrentScaling())
    assert model.loss_function is loss_utils.ForCausalLMLoss
    report = octavo.convert(vit(1), CurrentScaling())
    assert all(one.parts != ("loss",) for one in report.structures)


def test_a_class_with_a_loss_of_its_own_is_left_alone() -> None:
    model = llama(1)

    class Own(type(model)):  # type: ignore[misc]
        def loss_function(self, *args: Any, **kwargs: Any) -> Tensor:
            return torch.zeros(())

    model.__class__ = Own
    assert all(one.parts != ("loss",) for one in octavo.convert(model, CurrentScaling()).structures)
    assert "_loss_function" not in model.__dict__


class Mine(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.full((), 42.0)


def of_a_module(model: Any) -> None:
    model._loss_function = Mine()


def of_a_class(model: Any) -> None:
    model.__class__ = type("Theirs", (type(model),), {"_loss_function": lambda *_, **__: torch.full((), 42.0)})


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("change", [of_a_module, of_a_class])
def test_a_loss_that_is_a_module_or_a_method_stays(change: Any) -> None:
    model = llama(1)
    change(model)
    tokens = torch.randint(0, model.config.vocab_size, (2, 16))
    octavo.convert(model, CurrentScaling())
    assert float(model(input_ids=tokens, labels=tokens).loss) == 42.0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_module_within_is_passed_by() -> None:
    model: Any = llama(1)
    model.extra = torch.jit.trace(nn.Identity(), torch.ones(2))  # type: ignore[no-untyped-call]
    assert octavo.convert(model, CurrentScaling()).structures[-1].fused


@pytest.mark.usefixtures("_kernels")
def test_where_fp8_is_off_and_under_transforms_it_is_that_of_transformers() -> None:
    logits, labels = data(torch.bfloat16)
    expected = loss_utils.ForCausalLMLoss(logits, labels, CLASSES)
    (wanted,) = torch.autograd.grad(expected, logits)
    with octavo.autocast(enabled=False):
        (found,) = torch.autograd.grad(fused.causal_loss(logits, labels, CLASSES), logits, create_graph=True)
    assert torch.equal(found, wanted)
    assert torch.equal(torch.func.grad(lambda x: fused.causal_loss(x, labels, CLASSES))(logits.detach()), wanted)


def test_a_frozen_model_has_its_loss_back() -> None:
    from octavo.inference import freeze

    model = llama(1)
    octavo.convert(model, CurrentScaling())
    freeze(model)
    assert model.loss_function is loss_utils.ForCausalLMLoss


def test_models_that_generate_from_something_else_have_it_too() -> None:
    """Their type of loss has another name, and is the same function."""
    model = llama(1)
    model.loss_type = "ForConditionalGeneration"
    assert octavo.convert(model, CurrentScaling()).structures[-1].parts == ("loss",)


@pytest.mark.parametrize("kernels", [True, False])
def test_it_compiles_without_a_break(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_has_kernel", lambda logits: kernels)
    torch._dynamo.reset()
    logits, labels = data(torch.bfloat16)
    run = torch.compile(lambda x: fused.causal_loss(x, labels, CLASSES), backend="aot_eager", fullgraph=True)
    found, expected = run(logits), fused.causal_loss(logits, labels, CLASSES)
    assert torch.equal(found, expected)
    assert torch.equal(*(torch.autograd.grad(loss, logits)[0] for loss in (found, expected)))


def test_gpt2_with_labels_compiles_without_a_break() -> None:
    """transformers' own loss of it warns once, which Dynamo does not trace."""
    torch._dynamo.reset()
    model = gpt2(1).train()
    octavo.convert(model, CurrentScaling())
    tokens = torch.randint(0, model.config.vocab_size, (2, 16))
    run = torch.compile(lambda: model(input_ids=tokens, labels=tokens).loss, backend="aot_eager", fullgraph=True)
    loss = run()
    loss.backward()
    assert torch.equal(loss, step(model, tokens)[0])
