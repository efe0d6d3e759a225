"""Tables of facts about the run: formats, casts, what was shrunk, what ran how, machine, versions, data."""

from __future__ import annotations

import math
import shlex

from octavo.report.analysis import finetune_results, ptq_results
from octavo.report.record import Record, Row, number, text
from octavo.report.tables import Cell, Column, Table
from octavo.report.wording import ABSENT, duration, optional, rate, significant, size

_HASH_TONE = "mono"
_RAISED = str.maketrans("-0123456789", "\u207b\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079")


def _words(*titles: str) -> list[Column]:
    return [Column(title, numeric=False) for title in titles]


def limit(value: float) -> str:
    """A format's limit: four digits, and the power of two that it is, if it is one."""
    written = significant(value, 4)
    if "." in written and "e" not in written:
        written = written.rstrip("0").rstrip(".")
    mantissa, exponent = math.frexp(value)
    return f"{written} = 2{str(exponent - 1).translate(_RAISED)}" if mantissa == 0.5 else written


def formats_table(record: Record) -> Table:
    """The limits of each format: bits, largest, smallest normal and subnormal value, eps."""
    rows = []
    for row in record.all("format"):
        bits = optional(number(row, "bits"), lambda value: f"{value:.0f}")
        limits = [
            Cell(optional(number(row, key), limit)) for key in ("max", "smallest_normal", "smallest_subnormal", "eps")
        ]
        rows.append([Cell(text(row, "name")), Cell(bits), *limits])
    titles = ("Bits", "Largest", "Smallest normal", "Smallest subnormal", "eps")
    return Table("What each format can hold", [*_words("Format"), *(Column(title) for title in titles)], rows)


def casts_table(record: Record) -> Table:
    """The same numbers as fp32, bf16, E4M3 and E5M2 store them."""
    keys = ("value", "fp32", "bf16", "e4m3", "e5m2")
    rows = [[Cell(text(row, key) or ABSENT) for key in keys] for row in record.all("cast_example")]
    columns = [Column(title) for title in ("Number", "fp32", "bf16", "E4M3", "E5M2")]
    return Table("The same numbers in four formats, without a scale", columns, rows)


def adjustments_table(record: Record) -> Table:
    """What the study changed to fit its limits, and why."""
    rows = [
        [Cell(text(row, key) or ABSENT) for key in ("phase", "what", "wanted", "used", "why")]
        for row in record.all("adjustment")
    ]
    return Table("Adjustments", _words("Phase", "What", "Wanted", "Used", "Why"), rows)


def execution_table(record: Record) -> Table:
    """What ran natively and what was emulated, by method."""
    rows = []
    for result in ptq_results(record):
        formats = " / ".join(part for part in (result.weights, result.activations) if part) or ABSENT
        name = Cell(result.method.label, color=result.method.color)
        rows.append([Cell("quantized"), name, Cell(formats), Cell(result.execution or ABSENT)])
    for tuned in finetune_results(record):
        name = Cell(tuned.method.label, color=tuned.method.color)
        rows.append([Cell("fine-tuned"), name, Cell(tuned.served_as or ABSENT), Cell(tuned.execution or ABSENT)])
    return Table("Native and emulated", _words("Phase", "Method", "Weights / activations", "Execution"), rows)


def phases_table(record: Record) -> Table:
    """The phases of the study, the time each took, and how it ended."""
    rows = []
    for row in record.all("phase"):
        status = text(row, "status")
        tone = "" if status == "done" else "bad" if status == "skipped" else "muted"
        seconds = optional(number(row, "seconds"), duration)
        note = text(row, "note") or ABSENT
        rows.append([Cell(text(row, "name")), Cell(seconds), Cell(status or ABSENT, tone), Cell(note)])
    columns = [*_words("Phase"), Column("Time"), *_words("Status", "Note")]
    return Table("Phases", columns, rows)


def _pairs(caption: str, entries: list[tuple[str, str, str]]) -> Table:
    rows = [[Cell(name), Cell(value, tone)] for name, value, tone in entries if value and value != ABSENT]
    return Table(caption, _words("", ""), rows)


def command_line(record: Record) -> str:
    """The command that made the record, quoted for a shell; empty when unknown."""
    command = record.last("run").get("command")
    return (
        shlex.join(str(part) for part in command) if isinstance(command, list) else text(record.last("run"), "command")
    )


def machine_table(record: Record) -> Table:
    """Hardware, versions, seed and command line of the (newest) run."""
    run = record.last("run")
    native = {True: "native", False: "emulated"}.get(run.get("native_fp8"), "")  # type: ignore[arg-type]
    cores = optional(number(run, "cpu_count"), lambda value: f"{value:.0f}")
    return _pairs(
        "Machine and versions",
        [
            ("Device", text(run, "device_name"), ""),
            ("Kind", text(run, "device"), ""),
            ("CPU cores", cores, ""),
            ("FP8 matrix products", native, ""),
            ("Octavo", text(run, "octavo_version"), ""),
            ("PyTorch", text(run, "torch"), ""),
            ("Triton", text(run, "triton") or ("none" if run else ""), ""),
            ("Python", text(run, "python"), ""),
            ("Commit", text(run, "git_commit"), _HASH_TONE),
            ("Date (UTC)", text(run, "date"), ""),
            ("Preset", text(run, "preset"), ""),
            ("First seed", text(run, "seed"), ""),
            ("Time limit", optional(number(run, "time_limit_s"), duration), ""),
            ("Command", command_line(record), _HASH_TONE),
        ],
    )


def _tokens(row: Row) -> str:
    tokens = row.get("tokens")
    if not isinstance(tokens, dict):
        return ""
    parts = [f"{name} {rate(value)}" for name in tokens if (value := number(tokens, name)) is not None]
    return ", ".join(parts)


def data_table(record: Record) -> Table:
    """The text and the model: where they came from, how large they are, and the hash of the text."""
    data, model = record.last("data"), record.last("model")
    count = {key: optional(number(model, key), lambda value: f"{value:,.0f}") for key in ("parameters", "width")}
    shape = [f"{text(model, key)} {key}" for key in ("layers", "heads") if text(model, key)]
    return _pairs(
        "Data and model",
        [
            ("Text", text(data, "name"), ""),
            ("Source", text(data, "source"), ""),
            ("Documents", optional(number(data, "documents"), lambda value: f"{value:,.0f}"), ""),
            ("Size", optional(number(data, "bytes"), size), ""),
            ("SHA-256", text(data, "sha256"), _HASH_TONE),
            ("Tokens", _tokens(data), ""),
            ("Vocabulary", optional(number(data, "vocab_size"), lambda value: f"{value:,.0f}"), ""),
            ("Model", text(model, "preset"), ""),
            ("Parameters", count["parameters"], ""),
            ("Shape", ", ".join([*shape, f"width {count['width']}"]) if shape else "", ""),
            ("Context", optional(number(model, "context"), lambda value: f"{value:,.0f} tokens"), ""),
        ],
    )
