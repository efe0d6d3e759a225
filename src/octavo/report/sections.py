"""The sections of the page, in the order in which a reader asks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from octavo.report import charts_cost, charts_layers, charts_quality, charts_training, facts, tables
from octavo.report.figure import Chart
from octavo.report.record import Record
from octavo.report.tables import Table


@dataclass(frozen=True)
class Section:
    """A heading, a sentence that says how to read it, its charts and tables, or what is missing."""

    name: str
    title: str
    lead: str
    charts: list[Chart] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    absent: str = ""


def _section(
    record: Record,
    name: str,
    title: str,
    lead: str,
    charts: list[Callable[[Record], Chart | None]],
    shown: list[Callable[[Record], Table]],
    absent: str,
) -> Section:
    drawn = [chart for make in charts if (chart := make(record)) is not None]
    filled = [table for make in shown if (table := make(record)).rows]
    return Section(name, title, lead, drawn, filled, "" if drawn or filled else absent)


def _quality(record: Record) -> list[Section]:
    return [
        _section(
            record,
            "without-training",
            "Quantized without training",
            "The finished model, cast as it is. FP8 in cool colours, integers in warm ones, all on the same test text.",
            [charts_quality.ptq_chart],
            [tables.ptq_table],
            "The record has no rows of quantization: the study stopped before it, or left it out.",
        ),
        _section(
            record,
            "training",
            "Training",
            "",
            [charts_training.loss_chart],
            [],
            "The record has no losses: the study stopped before its first step.",
        ),
        _section(
            record,
            "fine-tuned",
            "Fine-tuned in FP8",
            "The same start, the same data in the same order, as many steps; each evaluated as it is served.",
            [charts_quality.gap_chart],
            [tables.finetune_table],
            "The record has no rows of fine-tuning: the study stopped before it, or left it out.",
        ),
        _section(
            record,
            "claims",
            "What is commonly claimed",
            "",
            [],
            [tables.claims_table],
            "The record has no rows of claims: they are judged when the study ends.",
        ),
    ]


def _inside(record: Record) -> list[Section]:
    return [
        _section(
            record,
            "layers",
            "Where the error arises",
            "Each layer of the quantized model against the same layer in high precision, on the same input.",
            [charts_layers.layer_chart],
            [tables.worst_layers_table],
            "The record has no errors of layers.",
        ),
        _section(
            record,
            "scales",
            "amax and scale",
            "Delayed scaling takes its scale from earlier steps: it lags behind a spike and remembers it a while.",
            [charts_layers.scale_chart],
            [],
            "The record has no history of amax and scale.",
        ),
        _section(
            record,
            "cost",
            "Speed and memory",
            charts_cost.cost_summary(record),
            [charts_cost.speed_chart, charts_cost.memory_chart],
            [],
            "The record has no figures of speed or memory.",
        ),
        _section(
            record,
            "formats",
            "The formats",
            "",
            [],
            [facts.formats_table, facts.casts_table],
            "The record has no table of formats.",
        ),
    ]


def sections(record: Record) -> list[Section]:
    """Every section; one without rows has no charts and tables, and says in ``absent`` what the record lacks."""
    run = _section(
        record,
        "run",
        "What ran, and where",
        "",
        [],
        [facts.adjustments_table, facts.execution_table, facts.phases_table, facts.machine_table, facts.data_table],
        "The record says nothing about the machine, the versions or the data.",
    )
    return [*_quality(record), *_inside(record), run]
