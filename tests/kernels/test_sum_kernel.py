"""Column sums joined from those of blocks: exact where sums are, always in the same order, one variant a key."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.interpreting import exact_conversions, interpreted, silent

pytest.importorskip("triton")

from tests.kernels.variants import BLACKWELL, HOPPER, compiled, launches_of, specialized, stack_and_local_bytes

from octavo.kernels import sum_kernel


@interpreted
@silent
def test_sums_of_integers_are_exact_and_what_is_not_finite_stays_in_its_column(monkeypatch: pytest.MonkeyPatch) -> None:
    exact_conversions(monkeypatch)
    for shape in ((1, 1), (1, 40), (2, 33), (32, 32), (33, 7), (100, 130)):
        parts = torch.randint(-1000, 1000, shape).float()
        assert torch.equal(sum_kernel.joined_sums(parts.flatten(), parts.shape[1]), parts.double().sum(0).float())
    parts[3, 0], parts[4, 1], parts[90, 1], parts[99, 129] = torch.tensor([1, 1, -1, float("nan")]) * float("inf")
    found = sum_kernel.joined_sums(parts.flatten(), parts.shape[1])
    assert found[0] == float("inf")
    assert found[[1, 129]].isnan().all()
    assert torch.equal(found[2:129], parts.double().sum(0).float()[2:129])


def test_equal_keys_are_one_variant_of_tritons(monkeypatch: pytest.MonkeyPatch) -> None:
    def call() -> None:
        for columns in (1, 2, 7, 8, 12, 16, 32, 1280):
            for parts in (1, 16, 17, 128):
                sum_kernel.joined_sums(torch.zeros(parts * columns), columns)

    variants: dict[object, list[tuple[str, object]]] = {}
    for launch in launches_of(monkeypatch, sum_kernel, "_launch_join", call):
        variant = specialized(sum_kernel.join_sums_kernel, launch)
        assert variants.setdefault(launch.key, variant) == variant, launch.key
    # One for each alignment of the columns: 1, 4, 8 and 16.
    assert len(variants) == 4


@pytest.mark.parametrize("capability", [HOPPER, BLACKWELL])
def test_nothing_is_added_in_an_order_of_chance(monkeypatch: pytest.MonkeyPatch, capability: int, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """No atomics; and sixteen bytes a read."""
    (launch,) = launches_of(
        monkeypatch, sum_kernel, "_launch_join", lambda: sum_kernel.joined_sums(torch.zeros(128 * 1280), 1280)
    )
    variant = compiled(sum_kernel.join_sums_kernel, launch, capability)
    assert "ld.global.v4.b32" in variant.asm["ptx"]
    assert "atom" not in variant.asm["ptx"]
    assert "red.global" not in variant.asm["ptx"]
    if capability == HOPPER:
        assert stack_and_local_bytes(variant, tmp_path) == [0, 0]
