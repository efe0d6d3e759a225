"""The answers of `octavo advise` on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from octavo.bench.advice import ModelAdvice, ShapeAdvice
from octavo.bench.advice.layers import LayerGroup
from octavo.conversion.card import GIB
from octavo.report.bench_fitting import kept_columns
from octavo.report.wording import enumeration

_SIZES = ("count", "in", "out", "tokens")
# Of these, what goes where there is too little room, in this order; longer names than so many letters fold.
_EXPENDABLE = ("tokens", "count", "out", "in")
_NAME = 30
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


def model_tables(answer: ModelAdvice, width: int | None = None) -> RenderableType:
    """A model: its Linears, and the memory of a step; in lines of `width` letters, or as long as they are for None."""
    tokens = f" of {answer.sequence} tokens" if answer.sequence else ""
    head = Text(
        f"{answer.model}: {_many(answer.parameters)} parameters, batch {answer.batch}{tokens},"
        f" {answer.precision}, {answer.optimizer}, on {answer.card}",
        style="bold",
    )
    return Group(
        head,
        *_layers(answer, width),
        Text(),
        _memory(answer),
        *_closing(answer.sentences, answer.card_source),
    )


def _layers(answer: ModelAdvice, width: int | None) -> list[RenderableType]:
    """The Linears, fitted to a width, and below why some stay in BF16 and which columns went."""
    recipes = list(answer.fp8_ms)
    names = ["Linears", *_SIZES, *recipes]
    rows = [_cells(group, recipes) for group in answer.layers]
    totals = [_gain(answer.bf16_ms / ms if ms else 1.0) for ms in answer.fp8_ms.values()]
    rows.append([Text("all together"), *(Text() for _ in _SIZES), *totals])
    gap = 2 if width is None else 1
    widths = [max(len(name), *(len(row[place]) for row in rows)) for place, name in enumerate(names)]
    least = [min(widths[0], _NAME), *widths[1:]]
    kept = kept_columns(least, [names.index(name) for name in _EXPENDABLE], width, gap)
    if width is not None:
        widths[0] = min(widths[0], max(1, width - sum(widths[place] + gap for place in kept[1:]) - gap))
    table = Table(box=None, padding=(0, gap, 0, 0))
    for place in kept:
        table.add_column(names[place], justify="right" if place else "left", width=widths[place], overflow="fold")
    for row in rows:
        table.add_row(*(row[place] for place in kept))
    gone = [name for name in _SIZES if names.index(name) not in kept]
    said = [f"{group.name} stays in BF16: {group.reason}." for group in answer.layers if group.reason]
    if any(group.tokens and one not in group.converted for group in answer.layers for one in recipes):
        said.append("In brackets: what a Linear would gain that stays in BF16 with that recipe.")
    if gone:
        said.append(f"Without {enumeration(gone)}, for want of width: a wider terminal or a file shows all columns.")
    return [table, *(Text(line, style="dim") for line in said)]


def _cells(group: LayerGroup, recipes: Sequence[str]) -> list[Text]:
    sizes = (group.count, group.in_features, group.out_features, group.tokens)
    gains = [_gain(group.gains[one], one in group.converted) if group.tokens else Text("-") for one in recipes]
    return [Text(group.name), *(Text(str(size)) for size in sizes), *gains]


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
    """Green if it gains; dim and in brackets where the layer stays in BF16."""
    return Text(f"{gain:.2f}x", style="green" if gain > 1 else "dim") if converted else Text(f"({gain:.2f}x)", "dim")


def _gib(size: int) -> str:
    if not size:
        return "-"
    return f"{size / GIB:.2f}" if size >= 0.005 * GIB else "<0.01"


def _many(count: int) -> str:
    return f"{count / 1e9:.3g} billion" if count >= 1e9 else f"{count / 1e6:.3g} million"


def _size(size: int | None) -> str:
    return "never" if size is None else str(size)
