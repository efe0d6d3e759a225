"""A byte-level BPE trained on the train split alone, and the token streams that models see.

Streams are one-dimensional int32 tensors: the documents of a split in corpus order, each followed by the end-of-text
token, so a model learns where one text ends. The vocabulary asked for is an upper bound: small texts give fewer merges.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from octavo.study.atomic import replacing

END_OF_TEXT = "<|endoftext|>"


class Encoder(Protocol):
    """What the study needs of a tokenizer, its own or one that came with a checkpoint."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""

    def encode(self, texts: Sequence[str]) -> torch.Tensor:
        """All texts as one int32 stream with an end-of-text token after each: [tokens]."""


class BytePairEncoder:
    """Byte-level BPE over `tokenizers`; any text round-trips."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Wrap a trained tokenizer that knows the end-of-text token."""
        self.tokenizer = tokenizer
        end = tokenizer.token_to_id(END_OF_TEXT)
        if end is None:
            raise ValueError(f"the tokenizer lacks the token {END_OF_TEXT}; train it with train_encoder")
        self._end: int = end

    @property
    def vocab_size(self) -> int:
        """Number of tokens, the end-of-text token included."""
        return int(self.tokenizer.get_vocab_size())

    def encode(self, texts: Sequence[str]) -> torch.Tensor:
        """All texts as one int32 stream with an end-of-text token after each: [tokens]."""
        stream: list[int] = []
        for encoding in self.tokenizer.encode_batch(list(texts), add_special_tokens=False):
            stream.extend(encoding.ids)
            stream.append(self._end)
        return torch.tensor(stream, dtype=torch.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens."""
        return str(self.tokenizer.decode(list(tokens)))

    def save(self, path: Path) -> None:
        """Write tokenizer.json, first to a temporary name."""
        with replacing(path) as temporary:
            self.tokenizer.save(str(temporary))

    @classmethod
    def load(cls, path: Path) -> BytePairEncoder:
        """Read what `save` wrote."""
        return cls(Tokenizer.from_file(str(path)))


def train_encoder(texts: Sequence[str], vocab_size: int) -> BytePairEncoder:
    """Train a byte-level BPE of at most `vocab_size` tokens (at least 257: every byte and the end of text)."""
    if vocab_size < 257:
        raise ValueError(f"vocab_size is {vocab_size}; a byte-level vocabulary needs at least 257 tokens")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return BytePairEncoder(tokenizer)
