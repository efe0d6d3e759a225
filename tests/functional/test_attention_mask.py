"""Who attends to whom: against each pair asked one by one; ALiBi against its definition; errors that teach."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.modules.attention_reference import allowed_pairs

from octavo.functional.attention_mask import MASK_TYPES, Valid, alibi_bias, alibi_slopes, attends, distance, mask_rules

LENGTHS = ((3, 5, 0, 1), (4, 2, 6, 0))


@pytest.mark.parametrize("window", [None, (-1, -1), (2, 0), (0, 0), (1, 1), (-1, 2), (2, -1)])
@pytest.mark.parametrize("extents", [(4, 5, 6), (4, 6, 6), (4, 7, 6)])
@pytest.mark.parametrize("mask_type", [name for name in MASK_TYPES if name != "arbitrary"])
def test_attends_is_the_definition(
    mask_type: str, extents: tuple[int, int, int], window: tuple[int, int] | None
) -> None:
    if "causal" in mask_type and window is not None and window[1] > 0:
        with pytest.raises(ValueError, match=r"a causal query sees no key to its right; give \("):
            mask_rules(mask_type, window)
        return
    rules, valid, lengths = mask_rules(mask_type, window), None, None
    _, num_queries, num_keys = extents
    if rules.padded:
        lengths = LENGTHS
        queries, keys = (
            torch.arange(n) < torch.tensor(real)[:, None] for n, real in zip(extents[1:], LENGTHS, strict=True)
        )
        valid = Valid(queries, keys)
    apart = distance(rules, num_queries, num_keys, valid, torch.device("cpu"))
    allowed = attends(rules, apart, valid)
    expected = allowed_pairs(mask_type, window, extents, lengths)
    if allowed is None:
        assert expected.all()
    else:
        assert torch.equal(allowed.expand(extents[0], 1, num_queries, num_keys), expected)


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        # The paper's: 1/2, 1/4, ... 1/256 for eight heads.
        (8, [2.0**-n for n in range(1, 9)]),
        (1, [2.0**-8]),
        # Of six: the four of four heads, and every second of eight's.
        (6, [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]),
    ],
)
def test_alibi_slopes(heads: int, expected: list[float]) -> None:
    assert alibi_slopes(heads).tolist() == expected


def test_alibi_bias_grows_with_distance_from_the_own_key() -> None:
    rules = mask_rules("causal_bottom_right")
    apart = distance(rules, 2, 4, None, torch.device("cpu"))
    bias = alibi_bias(torch.tensor([0.5, 0.25]), apart)
    # Query 0 stands beside key 2, query 1 beside key 3.
    assert bias[0, 0].tolist() == [[-1.0, -0.5, -0.0, -0.5], [-1.5, -1.0, -0.5, -0.0]]
    assert torch.equal(bias[:, 1], bias[:, 0] / 2)


@pytest.mark.parametrize(
    ("mask_type", "window", "sentence"),
    [
        ("casual", None, "attn_mask_type is 'casual': expected one of no_mask, causal"),
        ("causal", (2,), r"window_size is \(2,\): expected \(left, right\)"),
        ("causal", (-2, 0), r"window_size is \(-2, 0\): expected"),
        ("causal", (True, 0), r"window_size is \(True, 0\): expected"),
        ("arbitrary", (2, 2), "put the window into the mask"),
    ],
)
def test_contradictions_are_refused(mask_type: str, window: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        mask_rules(mask_type, window)


def test_after_a_cache_causal_aligns_with_the_last_keys() -> None:
    assert mask_rules("causal", (2, 0)).after_cache() == mask_rules("causal_bottom_right", (2, 0))
    assert mask_rules("no_mask").after_cache() == mask_rules("no_mask")
