"""The answers of `octavo advise` on a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from octavo.bench.advice import ModelAdvice, ShapeAdvice
from octavo.conversion.card import GIB

# Buffers below it are left out of the table.
_SMALLEST = 1 << 20


def shape_tables(answer: ShapeAdvice) -> RenderableType:
    """One Linear: a row a scaling."""
    table = Table(title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in ("recipe", "BF16 us", "FP8 us", "gain", "gains from tokens", "gains from square"):
        table.add_column(name, justify="left" if name == "recipe" else "right", no_wrap=name == "recipe")
    for one in answer.methods:
        sizes = (_size(one.smallest_tokens), _size(one.smallest_square))
        table.add_row(one.recipe, f"{answer.bf16_us:.0f}", f"{one.fp8_us:.0f}", _gain(one.gain), *sizes)
    bias = "with bias" if answer.bias else "without bias"
    head = Text(
        f"Linear, {answer.tokens} tokens, {answer.in_features} -> {answer.out_features}, {bias}: forward and backward,"
        f" GPU time, on {answer.card}",
        style="bold",
    )
    return Group(head, table, *_closing(answer.sentences, answer.card_source))


def model_tables(answer: ModelAdvice) -> RenderableType:
    """A model: its Linears, and the memory of a step."""
    tokens = f" of {answer.sequence} tokens" if answer.sequence else ""
    head = Text(
        f"{answer.model}: {_many(answer.parameters)} parameters, batch {answer.batch}{tokens},"
        f" {answer.precision}, {answer.optimizer}, on {answer.card}",
        style="bold",
    )
    return Group(
        head,
        _layers(answer),
        Text(),
        _memory(answer),
        *_closing(answer.sentences, answer.card_source),
    )


def _layers(answer: ModelAdvice) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    recipes = list(answer.fp8_ms)
    table.add_column("Linears", min_width=16, overflow="fold")
    for name in ("count", "in", "out", "tokens", *recipes):
        table.add_column(name, justify="right", no_wrap=True, min_width=len(name))
    explained = any(group.reason for group in answer.layers)
    if explained:
        table.add_column("stays in BF16, why")
    for group in answer.layers:
        sizes = (str(value) for value in (group.count, group.in_features, group.out_features, group.tokens))
        gains = (_gain(group.gains[one], one in group.converted) if group.tokens else Text("-") for one in recipes)
        table.add_row(group.name, *sizes, *gains, *([group.reason] if explained else []))
    table.add_section()
    gains = (_gain(answer.bf16_ms / ms if ms else 1.0) for ms in answer.fp8_ms.values())
    table.add_row("all together", "", "", "", "", *gains)
    return table


def _memory(answer: ModelAdvice) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("memory of a step, GiB")
    for one in answer.memory:
        table.add_column(one.recipe, justify="right")
    names = list(dict.fromkeys(name for one in answer.memory for name, _ in one.items))
    for name in names:
        sizes = [dict(one.items).get(name, 0) for one in answer.memory]
        if max(sizes) >= (_SMALLEST if name == "buffers" else 1):
            table.add_row(name, *(_gib(size) for size in sizes))
    table.add_section()
    table.add_row("about, in all", *(_gib(one.total) for one in answer.memory), style="bold")
    table.add_row(
        f"largest batch in {answer.memory_gib:.4g} GiB",
        *(str(answer.largest_batch[one.recipe]) for one in answer.memory),
    )
    return table


def _closing(sentences: tuple[str, ...], source: str) -> list[Text]:
    lines = [Text(), *(Text(f"- {sentence}") for sentence in sentences), Text()]
    return [*lines, Text(f"An estimate by a model of the card; {source}.", style="dim")]


def _gain(gain: float, converted: bool = True) -> Text:
    """Green if it gains, dim where the layer stays in BF16."""
    return Text(f"{gain:.2f}x", style="green" if gain > 1 and converted else "dim")


def _gib(size: int) -> str:
    if not size:
        return "-"
    return f"{size / GIB:.2f}" if size >= 0.005 * GIB else "<0.01"


def _many(count: int) -> str:
    return f"{count / 1e9:.3g} billion" if count >= 1e9 else f"{count / 1e6:.3g} million"


def _size(size: int | None) -> str:
    return "never" if size is None else str(size)
