from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from octavo.bench import BenchSettings
from octavo.bench.cases.ceilings import block_product, measure_copy
from octavo.bench.record import BenchRecord
from octavo.bench.session import Session
from octavo.bench.timing import Call, Measure
from octavo.formats import E4M3
from octavo.kernels.scaled_mm import blockwise


class Scripted:
    """A timer that knows beforehand how long each thing takes, in the order in which it is prepared."""

    method = "scripted"

    def __init__(self, *seconds: float | None) -> None:
        self.seconds = list(seconds)

    def prepare(self, calls: Sequence[Call]) -> Measure:
        for call in calls:
            call()
        value = self.seconds.pop(0)
        if value is None:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return lambda: value


def session(tmp_path: Path, timer: Scripted, *copies: int) -> Session:
    settings = BenchSettings(out=tmp_path, device="cpu")
    made = Session(settings, BenchRecord(settings.record_path), timer=timer)
    made.shapes = made.shapes._replace(copies=copies)
    return made


def test_the_ceiling_of_copying_is_the_fastest_of_several_sizes_and_all_are_recorded(tmp_path: Path) -> None:
    # Bytes read and written: 2 KB in 1 s, 4 KB in 1 s, 8 KB in 4 s. The middle one is the fastest.
    timer = Scripted(1.0, 1.0, 4.0)
    run = session(tmp_path, timer, 1000, 2000, 4000)
    measure_copy(run)
    assert [(row["shape"], row["per_s"]) for row in run.record.rows] == [([1000], 2e3), ([2000], 4e3), ([4000], 2e3)]
    assert {row["dtype"] for row in run.record.rows} == {"bfloat16"}
    assert run.ceilings.copy == 4e3
    measure_copy(run)  # there is one now: the timer has nothing left to say
    assert len(run.record.rows) == 3


def test_a_size_that_does_not_fit_is_a_row_and_the_others_go_on(tmp_path: Path) -> None:
    run = session(tmp_path, Scripted(1.0, None), 1000, 2000)
    measure_copy(run)
    assert {row["status"]: row["reason"] for row in run.record.rows} == {"failed": "out of memory", "measured": None}
    assert run.ceilings.copy == 2e3


@pytest.mark.parametrize(("m", "k", "n"), [(256, 768, 384), (128, 512, 256)])
def test_block_products_are_called_as_torch_wants_them(m: int, k: int, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.11 says: scales of a [m, k / 128] and of b [k / 128 filled up to 4s, n / 128], strides (1, ...)."""
    seen: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def product(a: torch.Tensor, b: torch.Tensor, scale_a: list[torch.Tensor], *rest: object) -> torch.Tensor:
        scale_b = rest[2]
        assert isinstance(scale_b, list)
        assert a.dtype == b.dtype == E4M3.dtype
        seen.extend((tuple(scale.shape), scale.stride()) for scale in (*scale_a, *scale_b))
        return torch.empty(a.shape[0], b.shape[1], dtype=torch.bfloat16)

    monkeypatch.setattr(torch, "_scaled_mm_v2", product, raising=False)
    monkeypatch.setattr(blockwise, "device_reasons", lambda device: [])
    out = block_product(torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16())()
    assert out.shape == (m, n)  # type: ignore[attr-defined]
    blocks = -(-k // 128)
    padded = -(-blocks // 4) * 4
    assert seen == [((m, blocks), (1, m)), ((padded, n // 128), (1, padded))]


def test_where_there_are_no_block_products_the_reason_says_so() -> None:
    with pytest.raises(ValueError, match="cpu has no FP8 matrix units"):
        block_product(torch.randn(128, 128).bfloat16(), torch.randn(128, 128).bfloat16())
