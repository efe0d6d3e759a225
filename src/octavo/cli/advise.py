"""`octavo advise`: whether FP8 gains, for one Linear or for a model, before anything is run."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType

from octavo.bench.advice import (
    AdviceError,
    ModelAdvice,
    Question,
    ShapeAdvice,
    card_named,
    methods_named,
    model_advice,
    shape_advice,
)
from octavo.cli.advise_tables import model_tables, shape_tables
from octavo.cli.printing import print_fitted

USAGE = 2

TokensOption = Annotated[int | None, typer.Option("--tokens", help="M: tokens that meet the Linear at once.")]
InOption = Annotated[int | None, typer.Option("--in", help="K: its input features.")]
OutOption = Annotated[int | None, typer.Option("--out", help="N: its output features.")]
BiasOption = Annotated[bool, typer.Option("--bias/--no-bias", help="Whether the Linear has a bias.")]
ModelOption = Annotated[
    str | None, typer.Option(help="A folder with a config.json, such a file, or a model name of timm's. Local only.")
]
BatchOption = Annotated[int | None, typer.Option(help="Samples of a step. Default: 8.")]
SequenceOption = Annotated[int | None, typer.Option(help="Tokens of a sample. Default: the context, up to 2048.")]
RecipeOption = Annotated[
    str | None, typer.Option(help="Scalings, by comma: delayed, current, rowwise, block. Default: all.")
]
SavedWeightOption = Annotated[
    str,
    typer.Option(help="fp8, or high_precision: weights are cast again in the backward, as a recipe's saved_weight."),
]
OptimizerOption = Annotated[str | None, typer.Option(help="adamw (default) or sgd, which has no momentum.")]
PrecisionOption = Annotated[
    str | None, typer.Option(help="autocast (default): float32 parameters; bf16: bf16 parameters, without masters.")
]
ExcludeOption = Annotated[
    list[str] | None, typer.Option(help="A pattern of layers to leave in BF16, as of convert; again for several.")
]
DeviceOption = Annotated[str, typer.Option(help="h200, h100 or auto: this machine's card, an H200 without one.")]
MemoryOption = Annotated[float | None, typer.Option(help="The card's memory in GiB. Default: the card's own.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def advise(
    tokens: TokensOption = None,
    in_features: InOption = None,
    out_features: OutOption = None,
    bias: BiasOption = True,
    model: ModelOption = None,
    batch: BatchOption = None,
    sequence: SequenceOption = None,
    recipe: RecipeOption = None,
    saved_weight: SavedWeightOption = "fp8",
    optimizer: OptimizerOption = None,
    precision: PrecisionOption = None,
    exclude: ExcludeOption = None,
    device: DeviceOption = "auto",
    memory: MemoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say whether FP8 gains, for one Linear or a model: time, memory, what fits, and when not to use it.

    Nothing is run and nothing downloaded: a model of the card, held to measurements, gives the times.

    Examples:

    [bold]octavo advise --tokens 8192 --in 1280 --out 5120[/bold]

    [bold]octavo advise --model path/to/checkpoint --batch 16 --sequence 1024[/bold]

    [bold]octavo advise --model config.json --device h100 --exclude lm_head --json[/bold]

    Exit codes: 0 done, 2 wrong usage.
    """
    of_model = {"batch": batch, "sequence": sequence, "optimizer": optimizer, "precision": precision}
    of_model["exclude"] = tuple(exclude) if exclude else None  # type: ignore[assignment]
    given = {name: value for name, value in of_model.items() if value is not None}
    shape = (tokens, in_features, out_features)
    answer: ShapeAdvice | ModelAdvice
    try:
        _check_question(model, shape, given, memory, bias)
        chosen, methods = card_named(device, memory), methods_named(recipe, saved_weight)
        if model is not None:
            answer = model_advice(_question(model, given), chosen, methods)
        else:
            answer = shape_advice(_whole(shape), chosen, methods, bias=bias)
    except AdviceError as error:
        Console(stderr=True).print(
            f"octavo advise: {error}", style="red", highlight=False, soft_wrap=True, markup=False
        )
        raise typer.Exit(USAGE) from error
    if as_json:
        typer.echo(json.dumps(as_data(answer), indent=1, allow_nan=False))
        return
    print_fitted(lambda width: _tables(answer, width))


def as_data(answer: ShapeAdvice | ModelAdvice) -> dict[str, Any]:
    """The answer as plain data; memory by item, in bytes."""
    data = dataclasses.asdict(answer)
    if isinstance(answer, ModelAdvice):
        data["memory"] = {
            one.recipe: dict(one.items) | {"total": one.total, "fits": one.fits(answer.memory_gib)}
            for one in answer.memory
        }
    return data


def _tables(answer: ShapeAdvice | ModelAdvice, width: int | None) -> RenderableType:
    return model_tables(answer, width) if isinstance(answer, ModelAdvice) else shape_tables(answer)


def _check_question(
    model: str | None, shape: tuple[int | None, ...], given: dict[str, Any], memory: float | None, bias: bool
) -> None:
    """One question, whole, without options of the other."""
    options = [option for option, value in zip(("--tokens", "--in", "--out"), shape, strict=True) if value is not None]
    if model is None:
        if len(options) < 3:
            missing = [option for option in ("--tokens", "--in", "--out") if option not in options]
            raise AdviceError(f"{', '.join(missing)} missing: give --tokens, --in and --out of a Linear, or --model")
        if given or memory is not None:
            first = f"--{next(iter(given))}" if given else "--memory"
            raise AdviceError(f"{first} goes with --model, not with the shape of one Linear")
    elif options or not bias:
        raise AdviceError(f"{options[0] if options else '--no-bias'} describes one Linear: leave it out with --model")


def _question(model: str, given: dict[str, Any]) -> Question:
    return Question(model, **given)


def _whole(shape: tuple[int | None, int | None, int | None]) -> tuple[int, int, int]:
    m, k, n = shape
    if m is None or k is None or n is None:
        raise AdviceError("--tokens, --in and --out describe one Linear together: give all three")
    return m, k, n
