"""The tables of the report as data: the page and the terminal show the same cells."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.report.analysis import WHY_NO_SHARE, PtqResult, finetune_results, ptq_results, within_bound
from octavo.report.methods import method, without_training
from octavo.report.record import Record, Row, number, text
from octavo.report.wording import (
    ABSENT,
    SPACE,
    Spread,
    decimals,
    duration,
    optional,
    percent,
    rate,
    significant,
    size,
    spread,
)

EMULATED_MARK = "\u2020"
EMULATED_NOTE = f"{EMULATED_MARK} emulated: the time of the emulation, no speed of this format"


@dataclass(frozen=True)
class Column:
    """A column's heading, its unit (empty if none) and whether it holds figures, which are set flush right."""

    title: str
    unit: str = ""
    numeric: bool = True

    @property
    def name(self) -> str:
        """Title and unit, which together tell the columns of a table apart."""
        return f"{self.title} {self.unit}".strip()


@dataclass(frozen=True)
class Cell:
    """One cell. ``tone`` is "", "good", "bad", "muted"; ``color`` is a method's colour token for a swatch, or empty."""

    text: str
    tone: str = ""
    color: str = ""


@dataclass(frozen=True)
class Table:
    """A caption, columns, rows and notes below. A table without rows is not shown."""

    caption: str
    columns: list[Column]
    rows: list[list[Cell]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def filled(table: Table) -> Table:
    """``table`` without the columns in which every cell is absent (such as peak memory on a CPU)."""
    kept = [i for i in range(len(table.columns)) if any(row[i].text != ABSENT for row in table.rows)]
    rows = [[row[i] for i in kept] for row in table.rows]
    return Table(table.caption, [table.columns[i] for i in kept], rows, table.notes)


def _accuracy(value: Spread | None) -> str:
    return spread(value, lambda share: percent(100 * share, 2, signed=False))


def _perplexity(value: Spread | None) -> str:
    return spread(value, lambda number: decimals(number, 2 if number < 1000 else 0))


def _timed(value: str, execution: str) -> Cell:
    """A figure of speed; marked when the arithmetic was emulated."""
    if value == ABSENT or "emulated" not in execution:
        return Cell(value)
    return Cell(f"{value}{SPACE}{EMULATED_MARK}", "muted")


def _seeds_note(values: list[Spread | None]) -> list[str]:
    count = max((value.count for value in values if value is not None), default=0)
    return [f"mean ± standard deviation over {count} seeds"] if count > 1 else []


def _emulated_note(executions: list[str]) -> list[str]:
    return [EMULATED_NOTE] if any("emulated" in execution for execution in executions) else []


def _ptq_cells(result: PtqResult) -> list[Cell]:
    change = ABSENT if result.method.family == "16-bit" else spread(result.change_percent, percent)
    return [
        Cell(result.method.label, color=result.method.color),
        Cell(_perplexity(result.perplexity)),
        Cell(change),
        Cell(_accuracy(result.accuracy)),
        Cell(optional(result.weight_bytes.mean if result.weight_bytes else None, size)),
        _timed(optional(result.load_s.mean if result.load_s else None, duration), ""),
        _timed(optional(result.ttft_s.mean if result.ttft_s else None, duration), result.execution),
        _timed(optional(result.prefill.mean if result.prefill else None, rate), result.execution),
        _timed(optional(result.decode.mean if result.decode else None, rate), result.execution),
        Cell(result.execution.replace(" ", SPACE) or ABSENT),
    ]


def ptq_table(record: Record) -> Table:
    """Quantization of the finished model: quality, memory, speed and how each method was executed."""
    results = ptq_results(record)
    columns = [
        Column("Method", numeric=False),
        Column("Perplexity"),
        Column("Change"),
        Column("Accuracy", "next token"),
        Column("Weights", "Linear layers"),
        Column("Load"),
        Column("First token"),
        Column("Prefill", "tokens/s"),
        Column("Decode", "tokens/s"),
        Column("Execution", numeric=False),
    ]
    notes = _seeds_note([result.perplexity for result in results])
    notes += _emulated_note([result.execution for result in results])
    notes += [f"{result.method.label}: {note}" for result in results for note in result.notes]
    return filled(Table("Figures by method", columns, [_ptq_cells(result) for result in results], notes))


def finetune_table(record: Record) -> Table:
    """Fine-tuning for the same steps: perplexity as served, the gap to 16 bits, the share recovered, speed, memory."""
    results = finetune_results(record)
    rows = []
    for result in results:
        gap = result.gap_percent
        tone = "" if gap is None else ("good" if within_bound(gap.mean) else "bad")
        recovered = optional(result.recovered, lambda share: percent(100 * share, 0, signed=False))
        rows.append(
            [
                Cell(result.method.label, color=result.method.color),
                Cell(result.served_as or ABSENT),
                Cell(_perplexity(result.perplexity)),
                Cell(spread(gap, percent), tone),
                Cell(spread(result.change_before, percent)),
                Cell(result.recovered_why or recovered, "muted" if result.recovered_why else ""),
                Cell(_perplexity(result.perplexity_bf16_serving)),
                Cell(_accuracy(result.accuracy)),
                _timed(optional(result.steps_per_s.mean if result.steps_per_s else None, rate), result.execution),
                Cell(optional(result.peak_memory.mean if result.peak_memory else None, size)),
                Cell(result.execution.replace(" ", SPACE) or ABSENT),
            ]
        )
    columns = [
        Column("Fine-tuned in", numeric=False),
        Column("Served as", numeric=False),
        Column("Perplexity", "as served"),
        Column("Gap to BF16", "fine-tuned"),
        Column("Change before", "without training"),
        Column("Recovered", "of that change"),
        Column("Perplexity", "served in 16 bits"),
        Column("Accuracy", "next token"),
        Column("Training", "steps/s"),
        Column("Peak memory"),
        Column("Execution", numeric=False),
    ]
    steps = [result.steps.mean for result in results if result.steps]
    notes = [f"{decimals(max(steps), 0)} steps each, from the same start on the same data"] if steps else []
    notes += _seeds_note([result.perplexity for result in results])
    reasons = dict.fromkeys(result.recovered_why for result in results if result.recovered_why)
    notes += [f"{why}: {WHY_NO_SHARE[why]}" for why in reasons]
    notes += _emulated_note([result.execution for result in results])
    return filled(Table("Figures by method, fine-tuned", columns, rows, notes))


_VERDICT = {
    True: Cell("\u2713 held", "good"),
    False: Cell("\u2717 not held", "bad"),
    None: Cell("? cannot be answered here", "muted"),
}


def claims_table(record: Record) -> Table:
    """What is commonly claimed, what was measured, and whether the claim held."""
    rows = []
    for row in record.all("claim"):
        held = row.get("held")
        verdict = _VERDICT[held if isinstance(held, bool) else None]
        names = ("claimed", "measured", "why", "source")
        rows.append([Cell(text(row, "claim")), verdict, *(Cell(text(row, name) or ABSENT) for name in names)])
    titles = ("Claim", "Verdict", "Claimed", "Measured here", "Why", "Source")
    return Table("Claims and measurements", [Column(title, numeric=False) for title in titles], rows)


def _mean(rows: list[Row], key: str) -> float | None:
    value = Spread.of(number(row, key) for row in rows)
    return value.mean if value else None


def worst_layers_table(record: Record, num_layers: int = 5) -> Table:
    """The layers with the lowest SQNR of their output, each with the FP8 method that does worst (mean over seeds)."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in record.all("layer_error"):
        if method(text(row, "method")).family == "FP8":
            found.setdefault((text(row, "layer"), text(row, "method")), []).append(row)
    worst: dict[str, tuple[float, str]] = {}
    for (layer, name), rows in found.items():
        output = _mean(rows, "output_sqnr_db")
        if output is not None:
            worst[layer] = min(worst.get(layer, (output, name)), (output, name))
    looks = {result.method.key: result.method for result in ptq_results(record)}
    cells = []
    for layer, (output, name) in sorted(worst.items(), key=lambda entry: entry[1])[:num_layers]:
        look, rows = looks.get(name, without_training(name)), found[layer, name]
        others = [_mean(rows, key) for key in ("weight_sqnr_db", "input_sqnr_db")]
        cells.append(
            [
                Cell(layer),
                Cell(look.label, color=look.color),
                *(Cell(optional(value, lambda decibels: decimals(decibels, 1))) for value in (output, *others)),
                Cell(optional(_mean(rows, "input_amax"), significant)),
            ]
        )
    columns = [
        Column("Layer", numeric=False),
        Column("Worst in", numeric=False),
        Column("Output", "SQNR, dB"),
        Column("Weight", "SQNR, dB"),
        Column("Input", "SQNR, dB"),
        Column("Input amax"),
    ]
    return Table("Where the error of FP8 is largest", columns, cells)
