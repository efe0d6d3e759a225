"""The sections of the page, in the order in which a reader asks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from octavo.report import charts_quality, facts, tables
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


def sections(record: Record) -> list[Section]:
    """Every section; one without rows has no charts and tables, and says in ``absent`` what the record lacks."""
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
            "fine-tuned",
            "Fine-tuned in FP8",
            "The same start, the same data in the same order, the same number of steps; each served as it was trained.",
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
        _section(
            record,
            "run",
            "What ran, and where",
            "",
            [],
            [
                facts.execution_table,
                facts.adjustments_table,
                facts.phases_table,
                facts.machine_table,
                facts.data_table,
            ],
            "The record says nothing about the machine, the versions or the data.",
        ),
    ]
