from __future__ import annotations

from pathlib import Path

import pytest
import torch

from octavo.study.tokens import Batches, TokenData, evaluation_windows

CPU = torch.device("cpu")
STREAM = torch.arange(1000, dtype=torch.int32)


def test_an_epoch_sees_each_window_once_and_targets_follow_inputs() -> None:
    batches = Batches(STREAM, batch_size=7, context=10, seed=3, device=CPU)
    starts = []
    for step in range(batches.steps_per_epoch):
        inputs, targets = batches(step)
        assert inputs.dtype == torch.int64
        assert targets.equal(inputs + 1)
        starts += inputs[:, 0].tolist()
    assert len(set(starts)) == len(starts) == batches.steps_per_epoch * 7


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    first, second = (Batches(STREAM, 7, 10, seed=3, device=CPU) for _ in range(2))
    for step in range(40):
        first(step)
    assert first(31)[0].equal(second(31)[0])
    assert not second(31)[0].equal(Batches(STREAM, 7, 10, seed=4, device=CPU)(31)[0])
    assert not second(0)[0].equal(second(14)[0])  # the next epoch has another order


def test_evaluation_predicts_each_target_once() -> None:
    seen = torch.cat([targets.reshape(-1) for _, targets in evaluation_windows(STREAM, 30, 4)])
    assert seen.equal(torch.arange(1, 991))  # 33 windows of 30; the tail of 9 is left out
    some = list(evaluation_windows(STREAM, 30, 4, max_tokens=100))
    assert sum(targets.numel() for _, targets in some) == 90


def test_saved_tokens_come_back_and_the_shortest_split_is_found(tmp_path: Path) -> None:
    data = TokenData(train=STREAM, validation=STREAM[:50], test=STREAM[:20])
    data.save(tmp_path / "t.safetensors")
    assert TokenData.load(tmp_path / "t.safetensors").validation.equal(STREAM[:50])
    assert data.shortest(32) == ("test", 20, 33)
    # Training needs the two windows and the token that Batches asks for: 40 tokens are more than 33 and too few.
    assert TokenData(STREAM[:40], STREAM[:50], STREAM[:50]).shortest(32) == ("train", 40, 65)
    assert Batches(STREAM[:65], 1, 32, seed=0, device=CPU).steps_per_epoch == 1
    with pytest.raises(ValueError, match="the stream has 64 tokens"):
        Batches(STREAM[:64], 1, 32, seed=0, device=CPU)
