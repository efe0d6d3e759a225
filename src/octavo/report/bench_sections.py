"""The sections of a bench's page, and what is said in words."""

from __future__ import annotations

import shlex

from octavo.report import bench_charts, bench_tables
from octavo.report.bench_emulated import as_emulated
from octavo.report.bench_inference import inference_tables
from octavo.report.bench_rivals import grouped, model_name
from octavo.report.bench_targets import targets_table
from octavo.report.headline import BAD, GOOD, PLAIN, WITHOUT, Sentence, Tile
from octavo.report.record import Record, Row, number, text
from octavo.report.sections import Section
from octavo.report.tables import Cell, Column, Table
from octavo.report.wording import ABSENT, duration, optional

TERMS = [
    ("Amax", "The largest absolute value of a tensor. The scale of its cast follows from it."),
    ("Best peer = 1", "Speed beside the fastest peer of the same comparison: above 1 is faster than it."),
    ("BF16 = 1", "Speed beside BF16: above 1 is faster. Of a Linear or a layer the faster of two BF16 counts."),
    ("Ceiling", "The largest rate that the same device reached in the same run, in a plain copy or product."),
    (
        "Compiled to reduce overhead",
        "Each block compiled, and replayed from CUDA graphs that the compiler records itself.",
    ),
    ("Compiled, compiled as a whole", "By torch.compile: a region a block, or the whole model as one."),
    ("Copy", "Reading a tensor and writing it elsewhere: what a cast at the speed of memory would cost."),
    ("Current, delayed scaling", "The scale is measured before each cast, or known from the steps before."),
    ("Decoding", "Writing one token after another, each from the keys and values kept of those before."),
    ("Device time", "How long the GPU works, measured by replaying a CUDA graph, so that the host does not count."),
    ("Dgrad, wgrad", "The products of the backward: the gradient of the input and that of the weight."),
    ("Drift", "What the first and the last measurement of the same thing differ by: the device's speed changes."),
    ("Emulated", "Computed with the same 8-bit values on a device without FP8 units. The time says nothing of FP8."),
    ("Floor", "The time of the products, casts and bytes of a call alone, at the run's ceilings: nothing is faster."),
    ("FP8 layers", "How many layers were converted and run in FP8; the others stay in BF16."),
    ("Graphed, captured", "Launched from a CUDA graph: forward and backward, or the whole step."),
    ("Host time", "How long the processor takes to launch the work. It decides where layers are small."),
    (
        "Inputs made again (lean)",
        "Inputs are made again in the backward instead of being kept, by Octavo or, of BF16, by the compiler: less"
        " memory, more time.",
    ),
    ("Noise", "What two measurements of the same thing differ by. Gaps no larger than it say nothing."),
    ("p10 – p90", "Eight of ten samples lie in between. The median is what is compared."),
    ("Peak memory", "The most that tensors held at once during the measured steps or calls."),
    ("Peer", "Another library's FP8, measured in the same run: Transformer Engine (TE) or torchao."),
    ("Prefill", "Reading a prompt as a whole, before the first token is written."),
    ("Rate", "Work a second: samples or tokens, bytes, or floating-point operations."),
    ("Row-wise, block scaling", "One scale a row, or a block of 128 values or 128 by 128 values."),
    ("Static, dynamic (of scales)", "Found once on sample inputs, or measured in every call."),
    ("Target", "What is asked of a figure. A Linear's: the products alone, and its casts at 89 % of copying."),
    ("Tensor-wise scaling", "One scale a tensor."),
    ("Time to the first token", "From the prompt in the host's memory until the first token is there."),
    (
        "Warm-up",
        "The first steps, in which the compiler works; left out where it had worked on the same blocks before.",
    ),
    ("Weight cached", "The weight's codes are those of the micro-batch before: it is cast once a step."),
]


def emulated_words(record: Record) -> str:
    """What a reader must know of figures taken where FP8 is emulated; empty elsewhere."""
    if record.last("run").get("native_fp8") is not False:
        return ""
    device = text(record.last("run"), "device_name") or "This device"
    return (
        f"{device} has no FP8 units: small shapes, wall time, FP8 emulated. The figures show that everything runs;"
        " none says how fast FP8 is, so nothing is compared here and no target judged."
    )


def verdict_words(record: Record) -> str:
    """How many targets passed, in one sentence."""
    count = dict.fromkeys(("pass", "miss", "reported"), 0)
    others = 0
    for row in record.all("target"):
        verdict = text(row, "verdict")
        if verdict in count:
            count[verdict] += 1
        else:
            others += 1
    return f"Targets: {count['pass']} passed, {count['miss']} missed, {others} not measured here."


def sentences(record: Record) -> list[Sentence]:
    """The answer: the targets in a sentence, then each one that was missed."""
    targets = record.all("target")
    missed = [row for row in targets if text(row, "verdict") == "miss"]
    passed = [row for row in targets if text(row, "verdict") == "pass"]
    if emulated_words(record):
        return [Sentence("No target is judged where FP8 is emulated.", WITHOUT)]
    if not passed and not missed:
        return [Sentence("No target was measured in this run.", WITHOUT)]
    found = [Sentence(verdict_words(record), BAD if missed else GOOD)]
    for row in missed:
        found.append(Sentence(f"{text(row, 'what')}: {text(row, 'measured')}, asked was {text(row, 'target')}.", BAD))
    return found


def tiles(record: Record) -> list[Tile]:
    """Passed, missed, and how long the run took."""
    targets = record.all("target")
    if not targets:
        return []
    passed = sum(text(row, "verdict") == "pass" for row in targets)
    missed = sum(text(row, "verdict") == "miss" for row in targets)
    seconds = sum(number(row, "seconds") or 0.0 for row in record.all("section"))
    if emulated_words(record):
        return [Tile(duration(seconds), "measuring", PLAIN)]
    return [
        Tile(str(passed), "targets passed", GOOD if passed else PLAIN),
        Tile(str(missed), "targets missed", BAD if missed else GOOD),
        Tile(duration(seconds), "measuring", PLAIN),
    ]


def machine_table(record: Record) -> Table:
    """Hardware, versions and the habits of measuring."""
    run = record.last("run")
    command, protocol, driver = run.get("command"), run.get("protocol"), run.get("driver")
    names = {
        "device_name": "Device",
        "device_memory_gib": "Memory, GiB",
        "octavo_version": "Octavo",
        "torch": "PyTorch",
        "cuda": "CUDA of PyTorch",
        "triton": "Triton",
        "transformer_engine": "Transformer Engine",
        "torchao": "torchao",
        "timm": "timm",
        "transformers": "transformers",
        "python": "Python",
        "git_commit": "Commit",
        "date": "Date (UTC)",
        "seed": "Seed",
    }
    entries = [(label, text(run, key)) for key, label in names.items()]
    if isinstance(driver, dict):
        entries.append(("Driver", ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in driver.items())))
    entries.append(("Time limit", optional(number(run, "time_limit_s"), duration)))
    if isinstance(command, list):
        entries.append(("Command", shlex.join(str(part) for part in command)))
    if isinstance(protocol, dict):
        entries += [(f"How: {key.replace('_', ' ')}", str(value)) for key, value in protocol.items()]
    rows = [[Cell(name), Cell(value)] for name, value in entries if value and value != "\u2014"]
    return Table("Machine, versions, method", [Column("", numeric=False), Column("", numeric=False)], rows)


def time_words(record: Record) -> str:
    """How long each section took, in one sentence; empty without sections."""
    parts = [f"{text(row, 'name')} {duration(number(row, 'seconds') or 0.0)}" for row in record.all("section")]
    return f"Time: {', '.join(parts)}." if parts else ""


def _spent(row: Row) -> str:
    """What a section's time went into, the longest first."""
    spent = row.get("spent")
    if not isinstance(spent, dict):
        return ABSENT
    seconds = {str(on): value for on in spent if (value := number(spent, on)) is not None and value >= 0.05}
    return ", ".join(f"{on} {duration(seconds[on])}" for on in sorted(seconds, key=lambda on: -seconds[on])) or ABSENT


def sections_table(record: Record) -> Table:
    """The sections of the run, the time each took, and what it went into."""
    rows = []
    for row in record.all("section"):
        status = text(row, "status")
        cells = [Cell(text(row, "name")), Cell(optional(number(row, "seconds"), duration)), Cell(_spent(row))]
        rows.append([*cells, Cell(status, "" if status == "done" else "bad"), Cell(text(row, "reason"))])
    titles = {"Section": False, "Time": True, "Spent on": False, "Status": False, "Note": False}
    return Table("Sections", [Column(title, numeric=numeric) for title, numeric in titles.items()], rows)


def _section(name: str, title: str, lead: str, charts: list[object], tables: list[Table], absent: str) -> Section:
    drawn = [chart for chart in charts if chart is not None]
    filled = [table for table in tables if table.rows or table.notes]
    return Section(name, title, lead, drawn, filled, "" if drawn or filled else absent)  # type: ignore[arg-type]


_JUDGED_ONLY = "FP8 is emulated on this device: nothing is compared with a ceiling or a target."


def bench_sections(record: Record) -> list[Section]:
    """Every section, the targets first and the machine last; of an emulated run wall times alone."""
    sections = _sections(record)
    if not emulated_words(record):
        return sections
    found = []
    for section in sections:
        if section.name in ("targets", "ceilings"):
            section = Section(section.name, section.title, section.lead, [], [], _JUDGED_ONLY)
        lead = section.lead.replace("Device time", "Wall time")
        # The chart of casts shows nothing but shares of copying.
        charts = [] if section.name == "casts" else section.charts
        tables = [as_emulated(table) for table in section.tables]
        found.append(Section(section.name, section.title, lead, charts, tables, section.absent))
    return found


def _sections(record: Record) -> list[Section]:
    linears = [bench_tables.linear_table(record, shape) for shape in grouped(record.all("linear"))]
    steps = _steps(record, "step")
    layers = [bench_tables.layers_table(record, shape) for shape in grouped(record.all("layer"))]
    small = ", in a small form" if text(record.last("run"), "device") == "cpu" else ""
    absent = "The record has no rows of this: the section was not asked for, or the time limit left it out."
    return [
        _section("targets", "Targets", "Each within one run, by one method.", [],
                 [targets_table(record)], "The record has no targets."),
        _section("ceilings", "Ceilings", "What the device reaches in this run.", [],
                 [bench_tables.ceilings_table(record)], absent),
        _section("casts", "Casts", "Codes in both layouts, beside a copy of the same matrix.",
                 [bench_charts.casts_chart(record)], [bench_tables.casts_table(record)], absent),
        _section("linear", "One Linear", "Device time of forward and backward, without a bias.",
                 [bench_charts.linear_chart(record)], linears, absent),
        _section("host", "Host time", "What a call costs the processor.",
                 [bench_charts.host_chart(record)], [bench_tables.host_table(record)], absent),
        _section("steps", "Training steps", "Forward, backward and AdamW of whole models, under autocast to BF16.",
                 [bench_charts.steps_chart(record)], steps, absent),
        _section("layers", "TransformerLayers", "Wall time of forward and backward, causal, by itself and graphed.", [],
                 layers, "These layers take minutes of their own: --only layers."),
        _section("inference", "Served models", "Prefill, decoding, the first token and loading, random weights.", [],
                 inference_tables(record, small), "Served models take minutes of their own: --only inference."),
        _section("article", "A larger batch in the same memory", "ViT-Huge, as in the article that inspired it.", [],
                 [*_steps(record, "article_step"), bench_tables.batch_table(record)],
                 "This comparison takes minutes of its own: --only article."),
        _section("run", "What ran, and where", "", [], [sections_table(record), machine_table(record)],
                 "The record says nothing about the machine."),
    ]  # fmt: skip


def _steps(record: Record, kind: str) -> list[Table]:
    """A table for each model."""
    form = ", in a small form" if text(record.last("run"), "device") == "cpu" else ""
    models = grouped(record.all(kind), by="model")
    return [_named(bench_tables.steps_table(record, model, kind), model_name(model) + form) for model in models]


def _named(table: Table, caption: str) -> Table:
    return Table(caption, table.columns, table.rows, table.notes)
