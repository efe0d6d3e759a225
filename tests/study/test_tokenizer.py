from __future__ import annotations

from pathlib import Path

import pytest

from octavo.study.tokenizer import END_OF_TEXT, BytePairEncoder, train_encoder

TEXTS = ["the scale of the tensor", "the codes of the tensor, ünïcode and \t tabs"] * 20


def test_any_text_round_trips_even_what_training_never_saw() -> None:
    encoder = train_encoder(TEXTS, 300)
    for text in ["the tensor", "漢字 🎲 \x00", " leading and trailing "]:
        tokens = encoder.encode([text]).tolist()
        assert encoder.decode(tokens[:-1]) == text
        assert tokens[-1] == encoder.tokenizer.token_to_id(END_OF_TEXT)


def test_training_is_deterministic_and_saving_keeps_it(tmp_path: Path) -> None:
    first, second = train_encoder(TEXTS, 290), train_encoder(TEXTS, 290)
    assert first.encode(TEXTS).equal(second.encode(TEXTS))
    first.save(tmp_path / "t.json")
    assert BytePairEncoder.load(tmp_path / "t.json").encode(TEXTS).equal(first.encode(TEXTS))
    assert 257 < first.vocab_size <= 290


def test_a_vocabulary_below_the_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size is 200; a byte-level vocabulary needs at least 257"):
        train_encoder(TEXTS, 200)
