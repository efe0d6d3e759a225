from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from octavo.bench.cases.article import largest_batch

Row = dict[str, float]


def memory(base: float, each: float, device: float = 1e9) -> tuple[Callable[[int], Row], list[int]]:
    """A model that takes `base` GiB and `each` GiB a sample, on a device with `device` GiB."""
    asked = []

    def measure(samples: int) -> Row:
        asked.append(samples)
        if base + each * samples > device:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return {"peak_gib": base + each * samples}

    return measure, asked


@pytest.mark.parametrize(("base", "each"), [(9.4, 0.4), (9.4, 0.1), (1.0, 0.9), (10.0, 0.31)])
def test_the_largest_batch_within_the_limit_is_found(base: float, each: float) -> None:
    measure, asked = memory(base, each)
    found = largest_batch(measure, 20.0)
    assert found is not None
    samples, figures = found
    assert figures["peak_gib"] <= 20.0 < base + each * (samples + 1)
    assert len(asked) <= 5


def test_what_does_not_fit_on_the_device_is_beyond_the_limit() -> None:
    measure, _ = memory(10.0, 0.6, device=19.0)
    found = largest_batch(measure, 20.0)
    assert found is not None
    assert found[1]["peak_gib"] <= 19.0


def test_a_model_that_does_not_fit_at_all_is_none() -> None:
    measure, asked = memory(30.0, 1.0)
    assert largest_batch(measure, 20.0) is None
    assert 1 in asked


def test_other_failures_go_through() -> None:
    def broken(samples: int) -> Row:
        raise RuntimeError("illegal memory access")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        largest_batch(broken, 20.0)
