"""Where tokens lie: sums and masks against lists of lengths; errors name the value, the rule and the remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.functional.attention_lengths import (
    check_broadcasts,
    check_ends,
    check_packed,
    known,
    valid_by_mask,
    valid_by_sums,
)

NAMES = "cu_seqlens_q", "cu_seqlens_kv"


def ends(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def test_sums_and_masks_say_the_same() -> None:
    real = torch.tensor([[True, True, False], [False, False, False]])
    for valid in (valid_by_sums(ends(0, 2, 2), None, 2, 3, 3), valid_by_mask(~real[:, None, None], 2, 3, 3)):
        assert torch.equal(valid.queries, real)
        # One object: queries and keys are of the same lengths.
        assert valid.keys is valid.queries
    different = valid_by_sums(ends(0, 2, 2), ends(0, 1, 5), 2, 3, 4)
    assert torch.equal(different.queries, real)
    assert different.keys.sum(-1).tolist() == [1, 4]


def test_one_mask_is_that_of_every_sequence() -> None:
    padding = torch.tensor([[[False, True, True]]])
    assert valid_by_mask(padding, 4, 3, 3).queries.tolist() == [[True, False, False]] * 4


MASKS: list[tuple[Any, str]] = [
    (torch.zeros(3, 9, dtype=torch.bool), r"shape \(3, 9\): .* is \[2, tokens\] or .* \[1, tokens\] for all 2"),
    (torch.zeros(9, dtype=torch.bool), r"shape \(9,\)"),
    (torch.zeros(2, 1, 9, 9, dtype=torch.bool), "a mask of each query goes with 'arbitrary'"),
    ((torch.zeros(2, 9, dtype=torch.bool), torch.zeros(1, 8, dtype=torch.bool)), "is for 9 queries and 8 keys"),
    (torch.zeros(2, 9), "has dtype torch.float32: expected bool"),
]


@pytest.mark.parametrize(("mask", "sentence"), MASKS)
def test_masks_of_something_else_are_refused(mask: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        valid_by_mask(mask, 2, 9, 9)


@pytest.mark.parametrize("mask", [True, (torch.zeros(2, 9, dtype=torch.bool),), (None, None)])
def test_what_is_no_mask_is_refused(mask: Any) -> None:
    with pytest.raises(TypeError, match=r"attention_mask .* expected a bool tensor"):
        valid_by_mask(mask, 2, 9, 9)


SUMS: list[tuple[Any, Any, str]] = [
    (ends(0, 3), None, r"cu_seqlens_q has shape \(2,\), for 1 sequences, and the batch has 2: expected \[3\]"),
    (ends(0, 3, 99), None, r"cu_seqlens_q is \[0, 3, 99\]: a sequence of 96 tokens, and there is room for 0 to 9"),
    (ends(0, 4, 3), None, "a sequence of -1 tokens"),
    (ends(0, 4, 8), ends(0, 4, 20), r"cu_seqlens_kv is \[0, 4, 20\]: a sequence of 16 tokens"),
    (ends(0, 4, 8).float(), None, r"has dtype torch.float32: .* use .int\(\)"),
    (ends(0, 4, 8)[None], None, r"has shape \(1, 3\): expected \[batch \+ 1\]"),
]


@pytest.mark.parametrize(("cu_q", "cu_kv", "sentence"), SUMS)
def test_sums_of_another_batch_are_refused(cu_q: Any, cu_kv: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        valid_by_sums(cu_q, cu_kv, 2, 9, 9)


def test_keys_of_other_lengths_need_their_own_sums() -> None:
    with pytest.raises(ValueError, match=r"there are 9 queries and 8 keys .* give cu_seqlens_kv, \[3\]"):
        valid_by_sums(ends(0, 4, 8), None, 2, 9, 8)


PACKED: list[tuple[Any, Any, str]] = [
    (ends(0, 4, 6), ends(0, 6), r"cu_seqlens_q has shape \(3,\) and cu_seqlens_kv \(2,\): .* of as many sequences"),
    (ends(0, 4, 3, 6), ends(0, 4, 5, 6), r"cu_seqlens_q is \[0, 4, 3, 6\]: 3 follows 4"),
    (ends(0, 3), ends(0, 9), r"cu_seqlens_kv is \[0, 9\]: there are 6 tokens"),
    (ends(-1, 3), ends(0, 6), "sequences must lie in 0 to 6"),
]


@pytest.mark.parametrize(("cu_q", "cu_kv", "sentence"), PACKED)
def test_packed_sequences_lie_within_their_tokens(cu_q: Any, cu_kv: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        check_packed(NAMES, (cu_q, cu_kv), (6, 6))
    check_packed(NAMES, (ends(1, 3, 3), ends(0, 2, 5)), (6, 6))


def test_a_list_is_told_to_be_a_tensor() -> None:
    with pytest.raises(TypeError, match=r"cu_seqlens_q is \[0, 6\], a list: expected a tensor"):
        check_packed(NAMES, ([0, 6], [0, 6]), (6, 6))


def test_numbers_on_a_device_are_not_waited_for() -> None:
    elsewhere = torch.empty(3, dtype=torch.int32, device="meta")
    assert known(elsewhere) is None
    check_packed(NAMES, (elsewhere, elsewhere), (6, 6))
    check_ends("cu_seqlens_q", None, 6)
    assert known(ends(0, 3)) == [0, 3]


@pytest.mark.parametrize("shape", [(3, 1, 9, 9), (9, 8), (1, 2, 4, 9, 9), (3, 9, 9)])
def test_what_does_not_broadcast_to_the_scores_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"must broadcast to \[batch, heads, queries, keys\], \[2, 4, 9, 9\]"):
        check_broadcasts("core_attention_bias", torch.zeros(shape), (2, 4, 9, 9))
    for fine in ((), (9,), (9, 9), (4, 1, 9), (2, 1, 9, 9)):
        check_broadcasts("core_attention_bias", torch.zeros(fine), (2, 4, 9, 9))
