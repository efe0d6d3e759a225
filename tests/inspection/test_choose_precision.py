"""`octavo.choose_precision`: which layers bear FP8, why, and that the model is left as it was."""

from __future__ import annotations

import copy
import math
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo.inspection import OperandFigures, PrecisionBounds, PrecisionTable, statistics
from octavo.inspection.layer_probe import kurtosis, rest_sqnr_db
from octavo.modules import FP8LinearMixin
from octavo.recipes import BlockScaling, CurrentScaling, DelayedScaling, Recipe, RowwiseScaling, StaticScaling

mse = nn.functional.mse_loss
WIDTH, OUT = 32, 16
RECIPES = [CurrentScaling(), DelayedScaling(), RowwiseScaling(), StaticScaling(input_scale=0.01)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class UncentredChannel(nn.Module):
    """One of the channels, which tanh keeps within 1, moves within 20 around 1000."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x[..., 3] = 1000 + 20 * x[..., 3]
        return x


def planted() -> nn.Sequential:
    """Layer 3 takes the uncentred channel, and its bias centres it."""
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        UncentredChannel(),
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, OUT),
    )
    with torch.no_grad():
        model[3].bias -= 1000 * model[3].weight[:, 3]
    return model


def plain(dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Dropout(dropout), nn.Linear(48, OUT))


def batches(count: int = 2, tokens: int = 64, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    matrix = torch.randn(WIDTH, OUT, generator=torch.Generator().manual_seed(0)) / WIDTH**0.5
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(tokens, WIDTH, generator=generator) for _ in range(count)]
    return [(x, torch.tanh(x @ matrix)) for x in inputs]


def final_loss(model: nn.Module, steps: int = 100) -> float:
    """Mean loss of the last 20 steps of a training under bf16 autocast, of `planted()`.

    A step of the layer with an input of 1000 is as much smaller.
    """
    others = [parameter for name, parameter in model.named_parameters() if not name.startswith("3.")]
    optimizer = torch.optim.Adam([{"params": model[3].parameters(), "lr": 1e-6}, {"params": others}], 2e-3)
    has_fp8 = any(isinstance(module, FP8LinearMixin) for module in model.modules())
    losses = []
    for x, targets in batches(steps, seed=2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = mse(model(x).float(), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if has_fp8:
            octavo.update_scales(model)
        losses.append(loss.item())
    return sum(losses[-20:]) / 20


def chosen_high(model: nn.Module, **options: Any) -> list[str]:
    _, table = octavo.choose_precision(model, batches(), loss=mse, **options)
    return [row.layer for row in table.high_precision]


@pytest.mark.parametrize("recipe", [CurrentScaling(), DelayedScaling()], ids=lambda recipe: type(recipe).__name__)
def test_a_planted_outlier_layer_is_found_and_training_follows_bf16(recipe: Recipe) -> None:
    torch.manual_seed(0)
    model = planted()
    everywhere, chosen = copy.deepcopy(model), copy.deepcopy(model)
    picked, table = octavo.choose_precision(model, batches(), recipe=recipe, loss=mse)
    assert [row.layer for row in table.high_precision] == ["3"]
    assert picked == recipe.replaced(overrides={"^3$": None})
    octavo.convert(everywhere, recipe, filter="all")
    octavo.convert(chosen, picked, filter="all")
    bf16, fp8, mixed = final_loss(model), final_loss(everywhere), final_loss(chosen)
    assert mixed == pytest.approx(bf16, rel=0.02)
    assert fp8 > 1.3 * bf16


@pytest.mark.parametrize("position", [0, 3, 5])
def test_a_channel_1000_times_larger_is_found_wherever_it_is(position: int) -> None:
    class Larger(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x[..., :7], 1000 * x[..., 7:8], x[..., 8:]], -1)

    model = planted()
    model[2] = nn.Identity()
    model[3].reset_parameters()
    model[position] = nn.Sequential(Larger(), model[position])
    assert chosen_high(model, budget=math.inf) == [f"{position}.1"]


@pytest.mark.parametrize("recipe", [*RECIPES, BlockScaling()], ids=lambda recipe: type(recipe).__name__)
def test_a_healthy_model_runs_in_fp8_everywhere(recipe: Recipe) -> None:
    model = plain()
    picked, table = octavo.choose_precision(model, batches(3), recipe=recipe, loss=mse)
    assert picked == recipe
    assert [row.layer for row in table.rows] == ["0", "3"]
    for row in table.rows:
        assert row.recipe == type(recipe).__name__
        assert [figures.operand for figures in row.operands] == ["input", "weight", "grad_output"]
        assert 0 < row.loss_change < 0.01
        assert row.reason == ""
    assert table.loss_change == table.loss_change_everywhere


def test_figures_are_those_of_the_cast_and_the_loss() -> None:
    torch.manual_seed(0)
    layer, [(x, targets)] = nn.Linear(WIDTH, OUT), batches(1)
    _, table = octavo.choose_precision(layer, [(x, targets)], loss=mse)
    [row] = table.rows
    q, w = octavo.quantize(x, octavo.E4M3), octavo.quantize(layer.weight.detach(), octavo.E4M3)
    cast = statistics(x, q)
    assert row.operands[0].sqnr_db == cast.sqnr_db
    assert (row.operands[0].underflow, row.operands[0].saturation) == (cast.underflow, cast.saturation)
    y = layer(x)
    loss = mse(y, targets)
    [g] = torch.autograd.grad(loss, [y])
    with torch.no_grad():
        change = (q.dequantize() @ w.dequantize().t() - x @ layer.weight.t()).double() * g.double()
    expected = max(abs(change.sum().item()), change.square().sum().sqrt().item()) / loss.item()
    assert row.loss_change == pytest.approx(expected, rel=1e-3)
    assert table.loss == pytest.approx(loss.item())


def test_the_predicted_change_is_about_that_of_the_loss() -> None:
    """Of a model with one layer in FP8; the loss is far from 0, and its square terms are small."""
    torch.manual_seed(0)
    model, [(x, targets)] = plain(), batches(1, tokens=512)
    for row in octavo.choose_precision(model, [(x, targets)], loss=mse).table.rows:
        one = copy.deepcopy(model)
        octavo.convert(one, include=f"^{row.layer}$", filter="all", fuse=False)
        with torch.no_grad():
            before, after = mse(model(x), targets), mse(one(x), targets)
        assert 0 < abs(after - before) / before < 3 * row.loss_change


def test_gradients_that_stay_in_high_precision_have_no_figures() -> None:
    _, table = octavo.choose_precision(plain(), batches(), recipe=CurrentScaling(backward="high_precision"), loss=mse)
    assert [[figures.operand for figures in row.operands] for row in table.rows] == [["input", "weight"]] * 2


def test_rounding_and_outliers_have_the_figures_they_should() -> None:
    x = torch.randn(4096, 64)
    assert kurtosis(x) == pytest.approx(3, rel=0.05)
    assert kurtosis(torch.ones(4)) == kurtosis(torch.zeros(0)) == 1
    assert rest_sqnr_db(x, 31.0) == pytest.approx(31.0, abs=0.2)
    x[:, 5] *= 1000
    assert kurtosis(x) == pytest.approx(3 * 64, rel=0.05)
    # 62 channels of 1 beside the noise of 10^6.
    assert rest_sqnr_db(x, 31.0) == pytest.approx(31.0 + 10 * math.log10(62 / 1e6), abs=0.2)
    assert rest_sqnr_db(x, math.inf) == math.inf
    assert rest_sqnr_db(torch.zeros(3, 64), -math.inf) == -math.inf


def test_the_budget_keeps_the_layers_that_change_the_loss_most() -> None:
    model = planted()
    model[2] = nn.Identity()
    model[3].reset_parameters()
    _, free = octavo.choose_precision(model, batches(), loss=mse, budget=math.inf)
    assert not free.high_precision
    by_change = sorted(free.rows, key=lambda row: row.loss_change)
    budget = math.hypot(*(row.loss_change for row in by_change[:2])) * 1.001
    picked, table = octavo.choose_precision(model, batches(), loss=mse, budget=budget)
    assert {row.layer for row in table.high_precision} == {row.layer for row in by_change[2:]}
    assert table.loss_change <= budget < table.loss_change_everywhere
    assert all("above the budget" in row.reason for row in table.high_precision)
    nothing, _ = octavo.choose_precision(model, batches(), loss=mse, budget=0)
    assert [pattern for pattern, _ in nothing.overrides] == ["^0$", "^3$", "^5$", "^7$"]
    assert [pattern for pattern, _ in picked.overrides] == [f"^{row.layer}$" for row in table.high_precision]


def test_each_bound_is_named_with_its_value() -> None:
    figures = OperandFigures("input", 12.0, 3.0, 0.5, 0.25, 900.0)
    reasons = list(PrecisionBounds(kurtosis=100).broken_by(figures))
    assert reasons == [
        "input: SQNR 12.0 dB, below 15",
        "input: rest (SQNR beside its outliers) 3.0 dB, below 10",
        "input: underflow 50.0%, above 25.0%",
        "input: saturation 25.0%, above 1.0%",
        "input: kurtosis 900, above 100",
    ]
    gradient = OperandFigures("grad_output", 25.0, 3.0, 0.0, 0.0, 900.0)
    assert list(PrecisionBounds(kurtosis=100).broken_by(gradient)) == []
    with pytest.raises(ValueError, match=r"underflow is '1': a bound is a number"):
        PrecisionBounds(underflow="1")  # type: ignore[arg-type]


def test_a_static_scale_that_saturates_is_seen() -> None:
    [row, _] = octavo.choose_precision(
        plain(), batches(), recipe=StaticScaling(input_scale=1e-3), loss=mse, budget=math.inf
    ).table.rows
    assert not row.fp8
    assert re.search(r"input: saturation \d\d\.\d%, above 1\.0%", row.reason)


def test_delayed_scales_follow_from_the_batches_before() -> None:
    """The second batch is ten times larger, and saturates under the scales of the first."""
    (x, targets), *_ = batches(1)
    layer = nn.Linear(WIDTH, OUT)
    same = octavo.choose_precision(layer, [(x, targets)] * 2, recipe=DelayedScaling(), loss=mse).table
    grown = octavo.choose_precision(layer, [(x, targets), (10 * x, targets)], recipe=DelayedScaling(), loss=mse).table
    assert same.rows[0].operands[0].saturation == 0
    assert grown.rows[0].operands[0].saturation > 0.1


def test_the_table_prints_layers_operands_figures_and_reasons() -> None:
    choice = octavo.choose_precision(planted(), batches(), loss=mse)
    head, *lines = str(choice).splitlines()
    assert head.split() == ["layer", "operand", "SQNR", "rest", "underflow", "saturated", "kurtosis", "loss", "choice"]
    assert [line.split()[:2] for line in lines[:9:3]] == [["0", "input"], ["3", "input"], ["5", "input"]]
    assert "high precision: input: rest (SQNR beside its outliers)" in lines[3]
    assert lines[0].endswith("  CurrentScaling")
    assert lines[-2].startswith("3 of 4 layers in FP8, from 2 batches. Predicted change of the loss")
    assert "rest is judged of input and weight, not of grad_output" in lines[-1]
    assert isinstance(choice.table, PrecisionTable)
    assert "layers in FP8, from 1 batch. Pred" in str(octavo.choose_precision(plain(), batches(1), loss=mse))


def test_names_are_escaped_and_anchored() -> None:
    model = nn.ModuleDict({"a.b".replace(".", "+"): nn.Linear(WIDTH, OUT)})
    model.forward = lambda x: model["a+b"](x)  # type: ignore[method-assign]
    picked, _ = octavo.choose_precision(model, batches(), loss=mse, budget=0)
    assert picked.overrides == ((r"^a\+b$", None),)
    assert picked.for_layer("a+b") is None
    assert picked.for_layer("xa+b") is picked
    root, _ = octavo.choose_precision(nn.Linear(WIDTH, OUT), batches(), loss=mse, budget=0)
    assert root.overrides == (("^$", None),)


def test_overrides_of_the_given_recipe_stay() -> None:
    given = CurrentScaling(overrides={"^0$": None, "3": RowwiseScaling()})
    picked, table = octavo.choose_precision(plain(), batches(), recipe=given, loss=mse)
    assert picked == given
    assert [(row.layer, row.recipe) for row in table.rows] == [("0", ""), ("3", "RowwiseScaling")]
    assert table.rows[0].reason == "the recipe's overrides keep it in high precision"
    none, _ = octavo.choose_precision(plain(), batches(), recipe=given, loss=mse, budget=0)
    assert none.overrides == (("^3$", None), *given.overrides)
    assert none.for_layer("3") is None


class Recorder(nn.Module):
    """Changes what a forward can change: a buffer in place, another by assignment, its own flag, random state."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.fails, self.first = fails, plain(dropout=0.5)
        self.norm, self.last = nn.BatchNorm1d(OUT), nn.Linear(OUT, OUT)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        random.random()
        y = self.last(self.norm(self.first(x)))
        if self.fails and self.seen > 1:
            self.eval()
            raise RuntimeError("on purpose")
        return y


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("converted", [False, True])
def test_the_model_is_left_as_it_was(fails: bool, converted: bool) -> None:
    model = Recorder(fails)
    model.last.eval()
    if converted:
        octavo.convert(model, DelayedScaling(), filter="all")
        mse(model(batches()[0][0]), batches()[0][1]).backward()
        octavo.update_scales(model)
        model.seen.zero_()
    else:
        model.first[0].weight.grad = torch.ones_like(model.first[0].weight)
    fired: list[Any] = []
    model.first[0].weight.register_post_accumulate_grad_hook(fired.append)
    before, flags = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    kinds, buffer = [type(module) for module in model.modules()], model.seen
    cpu, python = torch.get_rng_state(), random.getstate()
    if fails:
        with pytest.raises(RuntimeError, match="on purpose"):
            octavo.choose_precision(model, batches(), loss=mse)
    else:
        octavo.choose_precision(model, batches(), loss=mse)
    after = model.state_dict()
    # A scale that is not known yet is NaN.
    torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)
    assert [module.training for module in model.modules()] == flags
    for grad, parameter in zip(grads, model.parameters(), strict=True):
        assert parameter.grad is grad is None or torch.equal(parameter.grad, grad)
    assert [type(module) for module in model.modules()] == kinds
    assert model.seen is buffer
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.equal(torch.get_rng_state(), cpu)
    assert random.getstate() == python
    assert not fired


def test_a_converted_model_has_the_figures_of_the_unconverted_one() -> None:
    model = plain()
    converted = copy.deepcopy(model)
    octavo.convert(converted, CurrentScaling(), filter="all")
    expected = octavo.choose_precision(model, batches(), loss=mse)
    assert octavo.choose_precision(converted, batches(), loss=mse) == expected
    with octavo.autocast(recipe=CurrentScaling()), torch.no_grad():
        assert octavo.choose_precision(converted, batches(), loss=mse) == expected


def test_frozen_layers_before_the_first_trainable_one_are_measured() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 48), nn.ReLU(inplace=True), nn.Linear(48, OUT))
    expected = octavo.choose_precision(model, batches(), loss=mse)
    model[0].requires_grad_(False)
    assert octavo.choose_precision(model, batches(), loss=mse) == expected


def test_checkpointed_layers_are_measured_once() -> None:
    class Checkpointed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)

    model = plain()
    expected = octavo.choose_precision(model, batches(), loss=mse)
    assert octavo.choose_precision(Checkpointed(*model), batches(), loss=mse) == expected


def test_torch_autocast_around_it_counts() -> None:
    model, dtypes = plain(), []
    model[3].register_forward_hook(lambda module, args, y: dtypes.append(y.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        _, table = octavo.choose_precision(model, batches(), loss=lambda y, targets: mse(y.float(), targets))
    assert set(dtypes) == {torch.bfloat16}
    assert not table.high_precision
    assert table.rows[0].operands[0].sqnr_db == pytest.approx(31.5, abs=1)


def test_parts_of_octavos_own_layers_are_measured() -> None:
    model = nn.ModuleDict({"mlp": octavo.LayerNormMLP(WIDTH, 64), "head": octavo.LayerNormLinear(WIDTH, OUT)})
    model.forward = lambda x: model["head"](model["mlp"](x))  # type: ignore[method-assign]
    _, table = octavo.choose_precision(model, batches(), loss=mse)
    assert [row.layer for row in table.rows] == ["mlp.fc1", "mlp.fc2", "head"]
    assert all(len(row.operands) == 3 and row.fp8 for row in table.rows)


def test_weights_in_parts_and_experts_are_measured() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.experts = octavo.TransformerLayer(WIDTH, 64, 2), octavo.GroupedLinear(2, WIDTH, OUT)

        def forward(self, x: Tensor) -> Tensor:
            return self.experts(self.layer(x.unsqueeze(1)).squeeze(1), [24, 40])

    _, table = octavo.choose_precision(Experts(), batches(), loss=mse)
    attention, mlp = "layer.self_attention", "layer.layernorm_mlp"
    names = [f"{attention}.layernorm_qkv", f"{attention}.proj", f"{mlp}.fc1", f"{mlp}.fc2"]
    assert [row.layer for row in table.rows] == [*names, "experts.expert0", "experts.expert1"]
    assert all(len(row.operands) == 3 and row.fp8 for row in table.rows)


def test_a_layer_that_runs_without_gradients_is_told() -> None:
    class Reentrant(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.utils.checkpoint.checkpoint(self[0], x.requires_grad_(), use_reentrant=True)
            return self[1](y.detach())

    model = Reentrant(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, OUT))
    _, table = octavo.choose_precision(model, batches(), loss=mse)
    assert table.rows[0].reason.startswith(
        "it ran without gradients, as inside torch.no_grad or a reentrant checkpoint"
    )
    with pytest.raises(
        ValueError, match=r"none of the 1 linear layers of Linear was measured \(no product of its weight"
    ):
        octavo.choose_precision(nn.Linear(WIDTH, OUT), batches(), loss=lambda y, t: torch.ones((), requires_grad=True))


def test_tied_layers_are_chosen_together_and_unreached_ones_are_told() -> None:
    model = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
    model[1].weight = model[0].weight
    model.forward = lambda x: model[1](model[0](x).tanh())[..., :OUT]  # type: ignore[method-assign]
    picked, table = octavo.choose_precision(model, batches(), loss=mse, budget=0)
    assert [pattern for pattern, _ in picked.overrides] == ["^0$", "^1$"]
    assert table.rows[0].operands == table.rows[1].operands
    assert table.rows[2].fp8
    assert table.rows[2].reason == "no product of its weight was seen on the way to a loss: not measured"
    assert re.search(r"^2 +not measured +CurrentScaling: no product", str(table), re.M)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_models_of_transformers_give_their_own_loss(architecture: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, dict[str, Any]] = {
        "llama": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2},
        "gpt2": {"n_embd": 32, "n_layer": 1, "n_head": 2},
    }
    config = transformers.AutoConfig.for_model(architecture, vocab_size=64, **sizes[architecture])
    model = transformers.AutoModelForCausalLM.from_config(config)
    ids = torch.randint(0, 64, (2, 16))
    _, table = octavo.choose_precision(model, [{"input_ids": ids, "labels": ids}])
    assert len(table.rows) == {"llama": 8, "gpt2": 5}[architecture]
    assert all(len(row.operands) == 3 for row in table.rows)
    assert table.loss == pytest.approx(math.log(64), rel=0.1)
    octavo.convert(model, octavo.choose_precision(model, [{"input_ids": ids, "labels": ids}]).recipe, filter="all")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"batches": []}, "got no batch: give at least one"),
    ({"batches": torch.ones(2, WIDTH)}, r"batches is a Tensor, a single batch: give a list of batches"),
    ({"batches": None}, r"batches is a NoneType: expected a list of batches"),
    (
        {"loss": None},
        r"the model is called with a tuple of 2 \(a tensor \[64, 32\], a tensor \[64, 16\]\), and the forward of"
        r" Sequential takes \(input\)\. A tuple or a list holds .* give loss=, a function of \(output, targets\)",
    ),
    (
        {"batches": [(torch.ones(2, WIDTH), torch.ones(2, 1), torch.ones(2, WIDTH))]},
        r"called with a tuple of 2 \(a tensor \[2, 32\], a tensor \[2, 1\]\), and .* leave out what it does not take\."
        r" With loss= the last entry",
    ),
    ({"batches": [{"input": torch.ones(2, WIDTH), "labels": 1}]}, r"called with a mapping of 'input', 'labels', and "),
    ({"batches": [()]}, r"called with a tuple of 0 \(\), and the forward of Sequential takes \(input\)"),
    (
        {"loss": None, "batches": [batches()[0][:1]]},
        r"the loss is a tensor of shape \(64, 16\), and it must be a scalar tensor: give loss=",
    ),
    ({"loss": lambda y, t: y.sum().item()}, r"the loss is a float, and it must be a scalar tensor: give loss="),
    ({"loss": lambda y, t: y.sum() * math.inf}, r"the loss is (-?inf|nan), and it must be finite .* look at the batch"),
    ({"loss": lambda y, t: y.sum().detach()}, r"the loss holds no gradient.* compute it outside of torch\.no_grad"),
    ({"budget": -1}, "budget is -1: expected a relative change of the loss, 0 or more"),
    ({"budget": True}, "budget is True: expected"),
    ({"loss": "mse"}, r"loss is 'mse': expected a function of \(output, targets\)"),
    ({"loss": nn.CrossEntropyLoss}, r"loss is the class CrossEntropyLoss: give an instance, CrossEntropyLoss\(\)$"),
    (
        {"batches": (torch.ones(4, WIDTH), torch.ones(4, dtype=torch.int64)), "loss": nn.functional.cross_entropy},
        r"octavo\.choose_precision: batches is a tuple of 2 \(a tensor \[4, 32\], a tensor \[4\]\), so that each of its"
        r" tensors was taken for a batch, and .* failed \(.+\)\. If the tuple is one batch, give a list of one:"
        r" \[\(inputs, targets\)\]$",
    ),
    ({"bounds": 15}, "bounds is 15: expected an octavo.inspection.PrecisionBounds"),
    ({"recipe": "fp8"}, "recipe is 'fp8': expected one of octavo.recipes"),
    ({"model": nn.Sequential(nn.Conv1d(2, 2, 1))}, "Sequential has no linear layer to measure: give a model"),
    ({"model": plain().requires_grad_(False)}, "no parameter of Sequential requires a gradient.* unfreeze"),
    ({"model": torch.compile(plain(), backend="eager")}, "is compiled, and choose_precision looks at eager code only"),
    ({"recipe": CurrentScaling(overrides={"": None})}, r"no linear layer to measure \(0: the recipe's overrides"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=lambda value: value if isinstance(value, str) else None)
def test_what_cannot_be_judged_is_refused(changes: dict[str, Any], message: str) -> None:
    arguments = {"model": plain(), "batches": batches(), "loss": mse, **changes}
    with pytest.raises(ValueError, match=message):
        octavo.choose_precision(arguments.pop("model"), arguments.pop("batches"), **arguments)


def test_a_tuple_of_batches_that_are_tensors_is_taken() -> None:
    several = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    _, table = octavo.choose_precision(plain(), several, loss=lambda y, _: y.square().mean())
    assert table.batches == 2


def test_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"octavo\.choose_precision: model is a str"):
        octavo.choose_precision("model", batches())  # type: ignore[arg-type]


class Written(nn.Module):
    """Buffers that a forward writes to with what needs no gradient, resizes, fills and registers."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.last = nn.Linear(16, 16).requires_grad_(False), nn.Linear(16, 16)
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("sized", torch.zeros(0))
        self.register_buffer("unset", None)
        self.register_buffer("nan", torch.tensor(float("nan")).expand(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.frozen(x)
        self.mean.lerp_(y.mean(0), 0.1)
        self.sized.resize_(len(x)).fill_(1.0)
        self.unset = y.detach().mean()
        self.register_buffer("lazy", torch.ones(1))
        return self.last(y).square().mean()


def test_buffers_of_every_kind_are_left_as_they_were() -> None:
    model = Written()
    before = {name: None if one is None else one.clone() for name, one in model._buffers.items()}
    octavo.choose_precision(model, [torch.randn(8, 16)])
    assert list(model._buffers) == list(before)
    for name, one in model._buffers.items():
        torch.testing.assert_close(one, before[name], rtol=0.0, atol=0.0, equal_nan=True)
        assert one is None or (one.grad_fn is None and not one.requires_grad)


def test_a_parametrised_weight_is_looked_at_without_a_trace() -> None:
    other = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))
    model = nn.Sequential(nn.Linear(16, 16), other)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    octavo.choose_precision(model, [torch.randn(8, 16)], loss=lambda y, _: y.square().mean())
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
