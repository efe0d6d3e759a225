"""A tour of recipes: the same small model trained by each, and the ways to keep parts or phases of a run out of FP8.

    python examples/choosing_recipes.py      # some seconds on a CPU, where FP8 is emulated

1. Nine recipes, the first and last block in high precision: what the loss comes to, what ran in FP8.
2. `octavo.set_recipe`: high precision for the last part of a run.
3. `octavo.choose_precision`: one layer meets an outlier channel; it is found, and kept in high precision.
4. `octavo.PrecisionGuard`: the outlier appears in the middle of a run; the layer is moved when it does.

Whether FP8 gains time is another question, which `octavo bench` and `octavo advise` answer.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

import octavo
from octavo.recipes import (
    BlockScaling,
    CurrentScaling,
    CustomRecipe,
    DelayedScaling,
    MXFP8Scaling,
    QuantizeSpec,
    Recipe,
    RowwiseScaling,
    StaticScaling,
)

WIDTH, BLOCKS, TOKENS, STEPS = 64, 4, 64, 60
# The block whose second layer may meet an outlier channel.
DELICATE = 1

# One spec for each operand of each product; None for both of wgrad leaves the weight's gradient in high precision.
BY_HAND = CustomRecipe(
    fprop_input=QuantizeSpec(format="E4M3", granularity="row"),
    fprop_weight=QuantizeSpec(format="E4M3", granularity="row"),
    dgrad_grad_output=QuantizeSpec(format="E5M2", granularity="tensor"),
    dgrad_weight=QuantizeSpec(format="E4M3", granularity="tensor"),
    wgrad_grad_output=None,
    wgrad_input=None,
)
RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(amax_history_len=16),
    "current": CurrentScaling(),
    "row-wise": RowwiseScaling(),
    "row-wise, wgrad in high precision": RowwiseScaling(high_precision_wgrad=True),
    "by block": BlockScaling(),
    "MXFP8": MXFP8Scaling(),
    "by hand": BY_HAND,
    "current, gradients rounded by chance": CurrentScaling(grad_output_rounding="stochastic"),
}


class Block(nn.Module):
    """x + fc2(gelu(fc1(norm(x)))); after `meet_outlier` a channel of fc2's input moves within 20 around 1000."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.has_outlier = False

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, WIDTH] -> [tokens, WIDTH]."""
        h = nn.functional.gelu(self.fc1(self.norm(x)))
        if self.has_outlier:
            h = torch.cat((1000 + 20 * h[..., :1], h[..., 1:]), -1)
        return x + self.fc2(h)

    @torch.no_grad()
    def meet_outlier(self) -> None:
        """The bias takes the 1000 out again, so that the model computes next to what it did."""
        self.has_outlier = True
        self.fc2.bias -= 1000 * self.fc2.weight[:, 0]


class Model(nn.Module):
    """A stack of blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, WIDTH] -> [tokens, WIDTH]."""
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def convert(model: Model, recipe: Recipe) -> octavo.ConversionReport:
    """All blocks but the first and the last in FP8; here numbers are looked at, so layers too small to gain as well."""
    return octavo.convert(model, recipe, exclude="head", filter="all", high_precision_ends=1)


def train(
    model: Model,
    batches: list[tuple[Tensor, Tensor]],
    before: Callable[[int], object] = lambda step: None,
    after: Callable[[int], object] = lambda step: None,
) -> float:
    """Mean loss of the last ten steps; `before` and `after` are called with the number of each step."""
    # Adam's steps are as long for the weights that meet an outlier, where they do a thousand times as much: left out.
    delicate = {id(parameter) for parameter in model.blocks[DELICATE].fc2.parameters()}
    parameters = [parameter for parameter in model.parameters() if id(parameter) not in delicate]
    optimizer = torch.optim.Adam(parameters, lr=2e-3)
    converted = any(isinstance(module, octavo.Linear) for module in model.modules())
    losses = []
    for step, (x, target) in enumerate(batches):
        before(step)
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        if converted:
            octavo.update_scales(model)  # for delayed scaling; does nothing under the others
        optimizer.step()
        optimizer.zero_grad()
        after(step)
        losses.append(loss.item())
    return sum(losses[-10:]) / 10


def calibrated(model: Model, batches: list[tuple[Tensor, Tensor]]) -> Recipe:
    """A given scale for the input of each layer, as some batches have it before training; all else is measured."""
    scales = octavo.calibrate(model, [x for x, _ in batches[:4]])
    static = {f"^{re.escape(name)}$": StaticScaling(input_scale=scale) for name, scale in scales.items()}
    return CurrentScaling(overrides=static)


def products(model: Model, batch: tuple[Tensor, Tensor]) -> tuple[int, int]:
    """How many products of a step's converted layers run in FP8, and how many in high precision."""
    model = copy.deepcopy(model)
    with octavo.count_gemms() as counted:
        nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
    return counted.fp8, counted.high_precision


def row(name: str, loss: float, remark: str = "") -> str:
    return f"   {name:<38}{loss:>10.7f}   {remark}".rstrip()


def compare_recipes(model: Model, batches: list[tuple[Tensor, Tensor]]) -> None:
    report = convert(copy.deepcopy(model), CurrentScaling())
    print(f"in FP8: {', '.join(layer.name for layer in report.converted)}")
    for layer in report.skipped:
        print(f"not: {layer.name}, {layer.reason}")
    print(f"   {'recipe':<44}loss   products of a step in FP8, in high precision")
    print(row("none", train(copy.deepcopy(model), batches)))
    for name, recipe in (RECIPES | {"static, calibrated": calibrated(model, batches)}).items():
        trained = copy.deepcopy(model)
        convert(trained, recipe)
        fp8, high = products(trained, batches[0])
        print(row(name, train(trained, batches), f"{fp8}, {high}"))


def change_recipe(model: Model, batches: list[tuple[Tensor, Tensor]]) -> None:
    changed = copy.deepcopy(model)
    convert(changed, RECIPES["delayed"])

    def before(step: int) -> None:
        if step == STEPS // 2:
            octavo.set_recipe(changed, None)
        if step in (0, STEPS // 2):
            print(f"   from step {step} on: {products(changed, batches[step])[0]} products in FP8")

    print(row("delayed, then none", train(changed, batches, before)))


def choose_layers(model: Model, batches: list[tuple[Tensor, Tensor]]) -> None:
    planted = copy.deepcopy(model)
    planted.blocks[DELICATE].meet_outlier()
    recipe, table = octavo.choose_precision(planted, batches[:2], loss=nn.functional.mse_loss)
    for layer in table.high_precision:
        print(f"   stays out of FP8: {layer.layer}, {layer.reason}")
    everywhere, chosen = table.loss_change_everywhere, table.loss_change
    print(f"   predicted change of the loss: {everywhere:.1%} with FP8 everywhere, {chosen:.1%} as chosen")
    print(row("none", train(copy.deepcopy(planted), batches)))
    for name, one in {"FP8 everywhere": CurrentScaling(), "as chosen": recipe}.items():
        trained = copy.deepcopy(planted)
        octavo.convert(trained, one, filter="all")
        print(row(name, train(trained, batches)))


def guard_run(model: Model, batches: list[tuple[Tensor, Tensor]]) -> None:
    appears = STEPS // 3 + 2

    def outlier_in(one: Model) -> Callable[[int], None]:
        return lambda step: one.blocks[DELICATE].meet_outlier() if step == appears else None

    plain, alone, guarded = (copy.deepcopy(model) for _ in range(3))
    convert(alone, CurrentScaling())
    convert(guarded, CurrentScaling())
    print(row("none", train(plain, batches, outlier_in(plain))))
    print(row("without a guard", train(alone, batches, outlier_in(alone))))
    with octavo.PrecisionGuard(guarded, every=5) as guard, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of each move, which is printed here

        def after(step: int) -> None:
            for name in guard.step():
                print(f"   the outlier appears in step {appears}; high precision from step {step + 1} on: {name},")
                print(f"   {guard.moved[name]}")

        print(row("with a guard", train(guarded, batches, outlier_in(guarded), after)))


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        # Products are so small that threads would wait for one another: minutes, where the cores are busy.
        torch.set_num_threads(1)
    model = Model().to(device)
    truth = torch.randn(WIDTH, WIDTH, device=device) / WIDTH**0.5
    inputs = [torch.randn(TOKENS, WIDTH, device=device) for _ in range(STEPS)]
    batches = [(x, torch.tanh(x @ truth)) for x in inputs]
    parts = {
        "Recipes": compare_recipes,
        "Another recipe during a run": change_recipe,
        "Layers that do not bear FP8": choose_layers,
        "A guard during a run": guard_run,
    }
    for number, (title, part) in enumerate(parts.items(), 1):
        print(f"{'' if number == 1 else chr(10)}{number}. {title}")
        torch.manual_seed(1)
        part(model, batches)


if __name__ == "__main__":
    main()
