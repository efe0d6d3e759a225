"""Rules by which a target is judged from the rows of a record, and only from those of one run and one method."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from octavo.report.bench_rivals import compiled_before

Row = dict[str, Any]
PASS, MISS, NOT_MEASURED, REPORTED = "pass", "miss", "not measured", "reported"


class Verdict(NamedTuple):
    """What was measured, in words, the verdict, and what a reader must know beside it."""

    measured: str
    verdict: str
    reason: str


class Rule(Protocol):
    """Judges a record.

    Attributes:
        section: of the bench, whose rows it judges; "elsewhere" for none.
    """

    section: ClassVar[str]

    def __call__(self, rows: Sequence[Row]) -> Verdict:
        """The verdict, from the rows of one record."""
        ...


def _not_measured(reason: str) -> Verdict:
    return Verdict("", NOT_MEASURED, reason)


def _verdict(passed: bool) -> str:
    return PASS if passed else MISS


def _find(rows: Sequence[Row], kind: str, **fields: Any) -> Row | None:
    """The first measured row with these fields, or else the first one that says why it was not measured."""
    found = [row for row in rows if row["kind"] == kind and all(row.get(key) == value for key, value in fields.items())]
    return next((row for row in found if row["status"] == "measured"), found[0] if found else None)


def _find_linear(rows: Sequence[Row], rival: str, shape: tuple[int, int, int]) -> Row | None:
    """The row of a rival; where its whole shape was left out, the row that says why."""
    row = _find(rows, "linear", rival=rival, shape=list(shape))
    if row is not None:
        return row
    whole = _find(rows, "linear", rival="bf16", shape=list(shape))
    return whole if whole is not None and whole["status"] == "skipped" else None


def _subject(row: Row | None, rival: str) -> str:
    """What lacks: the rival, or its whole shape."""
    return rival if row is None or row["rival"] == rival else f"Linear {_extents(row)}"


def _extents(row: Row) -> str:
    return " x ".join(str(extent) for extent in row["shape"])


def _lack(row: Row | None, name: str) -> str | None:
    """Why a row has no figure; None if it has."""
    if row is None:
        return f"{name} was not asked for in this run"
    return None if row["status"] == "measured" else f"{name}: {row['reason']}"


@dataclass(frozen=True)
class CastRate:
    """A cast of the largest matrix runs at `least` of the ceiling of copying."""

    section: ClassVar[str] = "casts"
    name: str
    least: float

    def __call__(self, rows: Sequence[Row]) -> Verdict:
        """Against the run's ceiling; beside it, every shape against a copy of the same matrix."""
        own = [row for row in rows if row["kind"] == "cast" and row.get("name") == self.name]
        measured = [row for row in own if row["status"] == "measured"]
        if not measured:
            return _not_measured(_lack(own[0] if own else None, "the cast") or "")
        row = max(measured, key=lambda one: math.prod(one["shape"]))
        share = row["of_copy"]
        if share is None:
            return _not_measured("the rate of copying was not measured")
        rate = row["per_s"] / 1e12
        words = f"{100 * share:.1f} % of the ceiling ({rate:.2f} of {rate / share:.2f} TB/s) at {_extents(row)}"
        beside = [f"{_extents(one)} {100 * one['of_same_copy']:.0f} %" for one in measured if one.get("of_same_copy")]
        return Verdict(words, _verdict(share >= self.least), f"of a copy of the same matrix: {', '.join(beside)}")


@dataclass(frozen=True)
class LinearTime:
    """A Linear takes no longer than its products alone and its casts at 1 / 1.12 of copy's rate."""

    section: ClassVar[str] = "linear"
    rival: str
    shape: tuple[int, int, int]

    def __call__(self, rows: Sequence[Row]) -> Verdict:
        """Against `target_ms`, which its row has from the same run."""
        row = _find_linear(rows, self.rival, self.shape)
        if (lack := _lack(row, _subject(row, self.rival))) is not None or row is None:
            return _not_measured(lack or "")
        target = row.get("target_ms")
        if target is None:
            return _not_measured("the products alone or the rate of copying were not measured")
        words = f"{row['ms']:.4g} ms, {row['ms'] / target:.3f} of the {target:.4g} ms asked"
        return Verdict(words, _verdict(row["ms"] <= target), f"{row.get('speedup') or 0:.2f}x BF16")


@dataclass(frozen=True)
class BeatsPeer:
    """A Linear is faster than a peer's, by a margin."""

    section: ClassVar[str] = "linear"
    rival: str
    peer: str
    shape: tuple[int, int, int]
    margin: float = 0.0

    def __call__(self, rows: Sequence[Row]) -> Verdict:
        """Two figures of one method; for a peer measured by its kernels the rival has such a row too."""
        peer = _find_linear(rows, self.peer, self.shape)
        if (lack := _lack(peer, _subject(peer, self.peer))) is not None or peer is None:
            return _not_measured(lack or "")
        for key in (self.rival, f"{self.rival}-kernels"):
            own = _find(rows, "linear", rival=key, shape=list(self.shape))
            if own is not None and own["status"] == "measured" and own["method"] == peer["method"]:
                speed = peer["ms"] / own["ms"]
                words = f"{speed:.3f}x its speed ({own['ms']:.4g} against {peer['ms']:.4g} ms)"
                passed = speed > 1 if self.margin == 0 else speed >= 1 + self.margin
                return Verdict(words, _verdict(passed), f"by {peer['method']}")
        own = _find(rows, "linear", rival=self.rival, shape=list(self.shape))
        return _not_measured(_lack(own, self.rival) or f"{self.rival} and {self.peer} were measured by two methods")


@dataclass(frozen=True)
class HostRatio:
    """Forward and backward cost the host at most `most` times what nn.Linear costs it."""

    section: ClassVar[str] = "host"
    rival: str
    most: float

    def __call__(self, rows: Sequence[Row]) -> Verdict:
        """Against bf16 of the same run; the peers' ratios are named."""
        both = {"pass": "forward+backward"}
        row = _find(rows, "host", rival=self.rival, **both) or _find(rows, "host", rival=self.rival)
        if (lack := _lack(row, self.rival)) is not None or row is None:
            return _not_measured(lack or "")
        if row["ratio"] is None:
            return _not_measured("bf16 was not measured beside it")
        peers = [
            f"{other['rival']} {other['ratio']:.1f}x" for other in rows
            if other["kind"] == "host" and other.get("library") in ("te", "torchao")
            and other.get("pass") == "forward+backward" and other.get("ratio")
        ]  # fmt: skip
        words = f"{row['ratio']:.2f}x nn.Linear ({row['us']:.0f} µs)"
        return Verdict(words, _verdict(row["ratio"] <= self.most), ", ".join(peers))


def _steps(rows: Sequence[Row], model: str) -> list[Row]:
    return [row for row in rows if row["kind"] == "step" and row.get("model") == model and row["status"] == "measured"]


def fastest_octavo(rows: Sequence[Row], model: str) -> Row | None:
    """The measured step of Octavo's that takes the least time, however it is launched."""
    own = [row for row in _steps(rows, model) if row["library"] == "octavo"]
    return min(own, key=lambda row: float(row["ms"])) if own else None


def _references(rows: Sequence[Row], models: Sequence[str], reference: str, own: Row) -> list[Row]:
    """Steps of the reference, and of the same under a CUDA graph where Octavo's runs under one."""
    alike = (reference, f"{reference}-{own['graph']}")
    return [row for model in models for row in _steps(rows, model) if row["rival"] in alike]


@dataclass(frozen=True)
class StepSpeed:
    """A variant of Octavo's is `least` times as fast as a reference; `beside` are models that give one as well.

    A variant under a CUDA graph is compared with the faster of the reference as it is and under such a graph.
    """

    section: ClassVar[str] = "steps"
    model: str
    reference: str
    least: float
    beside: tuple[str, ...] = ()

    def __call__(self, rows: Sequence[Row]) -> Verdict:
        """Against the fastest measurement of the reference in the same run."""
        every = [row for row in _steps(rows, self.model) if row["library"] == "octavo"]
        if not every:
            return _not_measured(_lack(_find(rows, "step", model=self.model, library="octavo"), "Octavo") or "")
        models = self.model, *self.beside
        references = [(_fastest(_references(rows, models, self.reference, own)), own) for own in every]
        compared = [(best, own) for best, own in references if best is not None]
        if not compared:
            said = _find(rows, "step", model=self.model, rival=self.reference)
            return _not_measured(_lack(said, self.reference) or "")
        best, own = max(compared, key=lambda pair: float(pair[0]["ms"] / pair[1]["ms"]))
        speed = best["ms"] / own["ms"]
        whose = f" of {best['model']}" if self.beside else ""
        words = f"{speed:.3f}x ({own['ms']:.1f} against {best['ms']:.1f} ms{whose})"
        others = [
            f"{row['rival']} {best['ms'] / row['ms']:.2f}x" for row in _steps(rows, self.model)
            if row not in (own, best) and (row["library"] in ("te", "torchao") or row["graph"])
        ]  # fmt: skip
        whose = f"{own['rival']} against {best['rival']}"
        return Verdict(words, _verdict(speed >= self.least), "; ".join([whose, *others]))


def _layers(rows: Sequence[Row], shape: tuple[int, ...], graph: str) -> list[Row]:
    """The measured TransformerLayers of a shape, launched in one way."""
    found = [row for row in rows if row["kind"] == "layer" and row.get("shape") == list(shape)]
    return [row for row in found if row["status"] == "measured" and row["graph"] == graph]


def _fastest(rows: Sequence[Row]) -> Row | None:
    return min(rows, key=lambda row: float(row["ms"])) if rows else None


@dataclass(frozen=True)
class LayerSpeed:
    """Octavo's fastest recipe in a TransformerLayer is `least` times as fast as BF16, launched in the same way.

    BF16 is the faster of Octavo's layer under no recipe and torch's own composition. With `peer` it is a peer's fastest
    FP8 instead, which is to be beaten.
    """

    section: ClassVar[str] = "layers"
    shape: tuple[int, ...]
    graph: str = ""
    least: float = 1.0
    peer: str = ""

    def __call__(self, rows: Sequence[Row]) -> Verdict:
        """By wall time, in one run; the others are named."""
        measured = _layers(rows, self.shape, self.graph)
        own = _fastest([row for row in measured if row["library"] == "octavo"])
        against = [row for row in measured if row["library"] == (self.peer or "torch")]
        best = _fastest([row for row in against if row["recipe"] or not self.peer])
        if own is None or best is None:
            lacking = "octavo" if own is None else self.peer or "torch"
            row = _find(rows, "layer", shape=list(self.shape), graph=self.graph, library=lacking)
            return _not_measured(_lack(row, "the layer" if row is None else str(row["rival"])) or "it has no FP8")
        speed = best["ms"] / own["ms"]
        words = f"{speed:.3f}x ({own['ms']:.4g} against {best['ms']:.4g} ms)"
        passed = speed > 1 if self.peer else speed >= self.least
        beside = [f"{row['rival']} {row['ms']:.4g}" for row in measured if row not in (own, best)]
        return Verdict(words, _verdict(passed), f"{own['rival']} against {best['rival']}; in ms: {', '.join(beside)}")


@dataclass(frozen=True)
class StepMemory:
    """One variant that is `least` times as fast as the reference needs at most `most` of its peak memory.

    Of several that are as fast, the one that needs least; where none is, the fastest. Where that one's row has no peak,
    the one that needs most of Octavo's others is judged instead.
    """

    section: ClassVar[str] = "steps"
    model: str
    reference: str
    most: float
    least: float

    def __call__(self, rows: Sequence[Row]) -> Verdict:
        """Against the reference as it is, each model alone on the device."""
        own = fastest_octavo(rows, self.model)
        if own is None:
            return _not_measured(_lack(_find(rows, "step", model=self.model, library="octavo"), "Octavo") or "")
        references = [row for row in _steps(rows, self.model) if row["rival"] == self.reference]
        reference = next((row for row in references if row.get("peak_gib")), references[0] if references else None)
        if reference is None:
            said = _find(rows, "step", model=self.model, rival=self.reference)
            return _not_measured(_lack(said, self.reference) or "")
        if not reference.get("peak_gib"):
            return _not_measured(_no_peak(reference))
        every = [row for row in _steps(rows, self.model) if row["library"] == "octavo" and row.get("peak_gib")]
        small = [row for row in every if self._is_fast(rows, row)]
        own = min(small, key=lambda row: float(row["peak_gib"])) if small else own
        judged = own if own.get("peak_gib") else _most(every)
        if judged is None:
            return _not_measured(_no_peak(own))
        share = judged["peak_gib"] / reference["peak_gib"]
        words = f"{share:.3f} ({judged['peak_gib']:.2f} of {reference['peak_gib']:.2f} GiB)"
        least = min(every, key=lambda row: float(row["peak_gib"]))
        whose = f"{own['rival']} in {own['ms']:.1f} ms"
        if judged is not own:
            whose = f"{_no_peak(own)}; the most of the others: {judged['rival']} {judged['peak_gib']:.2f}"
        return Verdict(words, _verdict(share <= self.most), f"{whose}; least {least['rival']} {least['peak_gib']:.2f}")

    def _is_fast(self, rows: Sequence[Row], own: Row) -> bool:
        references = _references(rows, (self.model,), self.reference, own)
        return bool(own["ms"] <= min(float(row["ms"]) for row in references) / self.least)


def _most(rows: Sequence[Row]) -> Row | None:
    return max(rows, key=lambda row: float(row["peak_gib"])) if rows else None


def _no_peak(row: Row) -> str:
    """Which row lacks its peak memory, and what it says of that."""
    why = str(row.get("note") or "none is counted on this device").removeprefix("no peak memory: ")
    return f"{row['rival']} has no peak memory ({why})"


@dataclass(frozen=True)
class WarmUp:
    """Compiling Octavo's fastest variant without CUDA graphs takes at most `most` times what compiling BF16 takes.

    A step that is captured as one graph compiles before it is.
    """

    section: ClassVar[str] = "steps"
    model: str
    most: float

    def __call__(self, rows: Sequence[Row]) -> Verdict:
        """The first steps, compilation included, where nothing had compiled the same blocks before."""
        steps = _steps(rows, self.model)
        own = fastest_octavo([row for row in rows if not row.get("graph")], self.model)
        reference = next((row for row in steps if row["rival"] == "bf16-compiled" and not row["repeat"]), None)
        if own is None:
            return _not_measured(_lack(_find(rows, "step", model=self.model, library="octavo"), "Octavo") or "")
        if reference is None:
            said = _find(rows, "step", model=self.model, rival="bf16-compiled")
            return _not_measured(_lack(said, "bf16-compiled") or "it was measured at the end alone")
        if not _is_compiled(own):
            return _not_measured(f"{own['rival']}, the fastest without CUDA graphs, is not compiled")
        for row in (reference, own):
            if (before := compiled_before(steps, row)) is not None:
                return _not_measured(f"{row['rival']}: {before}")
        ratio = own["warm_s"] / reference["warm_s"]
        words = f"{ratio:.2f}x ({own['warm_s']:.1f} against {reference['warm_s']:.1f} s)"
        reason = f"{own['rival']}; what the compiler kept on disk from earlier runs counts"
        return Verdict(words, _verdict(ratio <= self.most), reason)


def _is_compiled(row: Row) -> bool:
    return any(part in ("compiled", "reduced", "whole") for part in row["rival"].split("-"))


@dataclass(frozen=True)
class LargestBatch:
    """How many samples a step takes in a limit of memory: told, not judged."""

    section: ClassVar[str] = "article"

    def __call__(self, rows: Sequence[Row]) -> Verdict:
        """Octavo's beside BF16's."""
        found = [row for row in rows if row["kind"] == "batch_limit"]
        measured = [row for row in found if row["status"] == "measured"]
        if not measured:
            return _not_measured(found[0]["reason"] if found else "the section article was not asked for in this run")
        words = [
            f"{row['rival']} {row['batch']} in {row['limit_gib']:g} GiB, {row['per_s']:.0f} {row['unit']}"
            for row in measured
        ]
        return Verdict("; ".join(words), REPORTED, "")


@dataclass(frozen=True)
class Elsewhere:
    """A target that this command does not measure, and why."""

    section: ClassVar[str] = "elsewhere"
    reason: str

    def __call__(self, rows: Sequence[Row]) -> Verdict:
        """Never measured here."""
        return _not_measured(self.reason)
