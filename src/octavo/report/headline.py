"""The answer in words, computed from the rows; what the record lacks; and which speeds are no speeds."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.report.analysis import (
    BOUND_PERCENT,
    FinetuneResult,
    PtqResult,
    factor,
    finetune_results,
    ptq_baseline,
    ptq_results,
    within_bound,
)
from octavo.report.record import Record, number, text
from octavo.report.wording import Spread, decimals, enumeration, percent, ratio, size, spread

WITHOUT = "without"  # tones of a sentence or tile: they choose a mark and a colour, never the words
GOOD, BAD, PLAIN = "good", "bad", "plain"


_SMALLEST_CHANGE = 0.01  # per cent: smaller ones are zero in the digits that are shown


@dataclass(frozen=True)
class Sentence:
    """One sentence of the answer. ``tone`` is GOOD, BAD, PLAIN or WITHOUT (the record cannot say)."""

    text: str
    tone: str


@dataclass(frozen=True)
class Tile:
    """One figure, set large, with what it is."""

    value: str
    caption: str
    tone: str


def _fp8(results: list[PtqResult]) -> list[PtqResult]:
    return [result for result in results if result.method.family == "FP8"]


def leading_ptq(results: list[PtqResult]) -> PtqResult | None:
    """The FP8 method that speaks for all: row-wise, otherwise the first one that has a change."""
    known = [result for result in _fp8(results) if result.change_percent is not None]
    rowwise = [result for result in known if result.method.color == "@green"]
    return next(iter(rowwise or known), None)


def _seeds(value: Spread) -> str:
    return "one seed" if value.count == 1 else f"{value.count} seeds"


def _ptq_sentences(results: list[PtqResult]) -> list[Sentence]:
    leader, baseline = leading_ptq(results), ptq_baseline(results)
    if leader is None or leader.change_percent is None:
        return [Sentence("What FP8 costs without training is not in this record.", WITHOUT)]
    change = leader.change_percent
    figures = ""
    if baseline is not None and baseline.perplexity is not None and leader.perplexity is not None:
        before, after = decimals(baseline.perplexity.mean, 2), decimals(leader.perplexity.mean, 2)
        figures = f", from {before} to {after}"
    tone = GOOD if change.mean < 0 or within_bound(change.mean) else PLAIN
    if abs(change.mean) < _SMALLEST_CHANGE:
        effect = f"changes perplexity by less than {percent(_SMALLEST_CHANGE, signed=False)}"
    elif change.mean > 0:
        effect = f"costs {spread(change, percent)} perplexity"
    else:
        effect = f"changes perplexity by {spread(change, percent)}"
    first = f"{leader.method.label} {effect} without training{figures}"
    sentences = [Sentence(f"{first} ({_seeds(change)}).", tone)]
    others = [
        f"{result.method.label} {spread(result.change_percent, percent)}"
        for result in results
        if result.method.family == "INT" and result.change_percent is not None
    ]
    if others:
        sentences.append(Sentence(f"For comparison, also without training: {enumeration(others)}.", PLAIN))
    return sentences


def _gap_words(result: FinetuneResult) -> str:
    words = f"{result.method.label} ends {spread(result.gap_percent, percent)} from it"
    if result.recovered is None:
        return words
    if result.recovered >= 1:
        return f"{words} and recovers all of its loss"
    if result.recovered <= 0:
        return f"{words} and recovers none of its loss"
    return f"{words} and recovers {percent(100 * result.recovered, 0, signed=False)} of its loss"


def _finetune_sentences(results: list[FinetuneResult]) -> list[Sentence]:
    tuned = [result for result in results if not result.is_baseline and result.gap_percent is not None]
    if not tuned:
        return [Sentence("What fine-tuning in FP8 recovers is not in this record.", WITHOUT)]
    baseline = next((result for result in results if result.is_baseline), None)
    name = baseline.method.label if baseline else "16 bits"
    gaps = [result.gap_percent.mean for result in tuned if result.gap_percent is not None]
    within = sum(map(within_bound, gaps))
    count = f"all {len(gaps)}" if within == len(gaps) > 1 else f"{within} of {len(gaps)}"
    words = enumeration([_gap_words(result) for result in tuned])
    bound = percent(BOUND_PERCENT, 0, signed=False)
    return [
        Sentence(
            f"Fine-tuned in FP8 for as many steps as {name} and served in FP8, {count} "
            f"{'lies' if len(gaps) == 1 else 'lie'} within {bound} of {name}'s perplexity: {words}.",
            GOOD if within == len(gaps) else BAD,
        )
    ]


def _memory_sentence(results: list[PtqResult]) -> list[Sentence]:
    leader, baseline = leading_ptq(results), ptq_baseline(results)
    if leader is None or baseline is None or leader.weight_bytes is None or baseline.weight_bytes is None:
        return []
    share = leader.weight_bytes.mean / baseline.weight_bytes.mean
    before, after = size(baseline.weight_bytes.mean), size(leader.weight_bytes.mean)
    return [Sentence(f"The weights of the Linear layers take {after} instead of {before} ({ratio(share)}).", PLAIN)]


def _speed_sentence(results: list[PtqResult]) -> Sentence:
    baseline, fp8 = ptq_baseline(results), _fp8(results)
    if baseline is None or not fp8:
        return Sentence("The speed of FP8 is not in this record.", WITHOUT)
    parts = []
    for result in fp8:
        if result.execution != "native":
            continue
        prefill, decode = factor(result.prefill, baseline.prefill), factor(result.decode, baseline.decode)
        if prefill is not None and decode is not None:
            parts.append(f"{result.method.label} prefills at {ratio(prefill)} and decodes at {ratio(decode)}")
    if parts:
        return Sentence(f"Native speed against {baseline.method.label}: {enumeration(parts)}.", PLAIN)
    if any(result.execution == "emulated" for result in fp8):
        return Sentence("FP8 is emulated on this machine, so this study makes no claim about its speed.", WITHOUT)
    return Sentence("The speed of native FP8 is not in this record.", WITHOUT)


def sentences(record: Record) -> list[Sentence]:
    """The answer to "what does FP8 do to my model?", one sentence a question: quality, training, memory, speed."""
    ptq = ptq_results(record)
    tuned = finetune_results(record)
    return [*_ptq_sentences(ptq), *_finetune_sentences(tuned), *_memory_sentence(ptq), _speed_sentence(ptq)]


def _speed_tile(ptq: list[PtqResult]) -> Tile | None:
    leader, baseline = leading_ptq(ptq), ptq_baseline(ptq)
    if leader is None or baseline is None:
        return None
    if leader.execution == "emulated":
        return Tile("no claim", "speed of FP8: it is emulated here", WITHOUT)
    decode = factor(leader.decode, baseline.decode)
    if leader.execution != "native" or decode is None:
        return None
    return Tile(ratio(decode), f"decoding speed against {baseline.method.label}, {leader.method.label}", PLAIN)


def tiles(record: Record) -> list[Tile]:
    """Up to four figures that carry the answer; those that the record cannot give are left out."""
    ptq, tuned = ptq_results(record), finetune_results(record)
    found: list[Tile] = []
    leader, baseline = leading_ptq(ptq), ptq_baseline(ptq)
    if leader is not None and leader.change_percent is not None:
        value = percent(leader.change_percent.mean)
        tone = GOOD if within_bound(leader.change_percent.mean) else PLAIN
        found.append(Tile(value, f"perplexity, {leader.method.label}, without training", tone))
    gaps = [(abs(r.gap_percent.mean), r) for r in tuned if r.gap_percent is not None and not r.is_baseline]
    if gaps:
        worst = max(gaps, key=lambda pair: pair[0])[1]
        assert worst.gap_percent is not None
        tone = GOOD if within_bound(worst.gap_percent.mean) else BAD
        among = f", worst of {len(gaps)}" if len(gaps) > 1 else ""
        caption = f"perplexity against 16 bits, fine-tuned{among}: {worst.method.label}"
        found.append(Tile(percent(worst.gap_percent.mean), caption, tone))
    share = factor(leader.weight_bytes, baseline.weight_bytes) if leader and baseline else None
    if share is not None:
        found.append(Tile(ratio(share), "weight memory of the Linear layers", PLAIN))
    speed = _speed_tile(ptq)
    return [*found, speed] if speed else found


def emulated_labels(record: Record) -> list[str]:
    """The methods whose arithmetic was emulated, so that their speed is none of the format's."""
    labels = [result.method.label for result in ptq_results(record) if "emulated" in result.execution]
    labels += [result.method.label for result in finetune_results(record) if "emulated" in result.execution]
    return list(dict.fromkeys(labels))


def emulation_banner(record: Record) -> str:
    """The warning above all speed figures, or an empty text when nothing was emulated."""
    labels = emulated_labels(record)
    if not labels:
        return ""
    results = ptq_results(record) + finetune_results(record)
    native = [result for result in results if result.method.family == "FP8" and result.execution == "native"]
    run = record.last("run")
    machine = text(run, "device_name") or text(run, "device") or "this machine"
    if not native:
        return (
            f"FP8 arithmetic was emulated on {machine}. Perplexity, accuracy and memory are those of FP8; the times "
            "are not. Every figure of speed that is marked or hatched is the speed of the emulation: "
            "these figures are no speed of FP8."
        )
    return (
        f"Emulated on {machine}: {enumeration(labels)}. Their results count; their figures of speed are those of the "
        "emulation and say nothing about the formats. All other figures of speed are native."
    )


_EXPECTED = [
    ("run", "the machine, versions and command line"),
    ("data", "the text that was used and its hash"),
    ("model", "the size of the model"),
    ("train_step", "training losses"),
    ("validation", "validation losses"),
    ("ptq", "quantization without training: its perplexity, memory and speed"),
    ("layer_error", "the error of each layer"),
    ("finetune", "fine-tuning: its gap to 16 bits and the share recovered"),
    ("scale_history", "amax and scale over time"),
    ("claim", "what is commonly claimed, and whether it held"),
    ("format", "the limits of the formats"),
    ("cast_example", "the same numbers in four formats"),
]


def missing(record: Record) -> list[str]:
    """What a complete study has and this record lacks, in words; empty for a complete one."""
    lacking = [what for kind, what in _EXPECTED if not record.all(kind)]
    for row in record.all("phase"):
        if text(row, "status") not in ("done", "shrunk", ""):
            note = text(row, "note")
            lacking.append(f"phase {text(row, 'name')}: {text(row, 'status')}{f' ({note})' if note else ''}")
    if record.skipped:
        lacking.append(f"what is in {record.skipped} of its entries, which have no kind and were left out")
    without_figure = [text(row, "method") for row in record.all("ptq") if number(row, "perplexity") is None]
    if without_figure:
        lacking.append(f"the perplexity of {enumeration(list(dict.fromkeys(without_figure)))}")
    return lacking
