"""Phase `data`: read the text, split it, train the tokenizer on the train split, store token streams."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.study.corpus import DataError, load_corpus
from octavo.study.documents import SPLITS, Corpus, texts
from octavo.study.pieces import in_pieces
from octavo.study.pretrained import PretrainedEncoder
from octavo.study.record import Row
from octavo.study.run import TOKENIZER, TOKENS, Run, shape_row
from octavo.study.tokenizer import Encoder, train_encoder
from octavo.study.tokens import TokenData


def prepare_data(run: Run) -> list[Row]:
    """Write tokenizer.json and tokens.safetensors; the rows `data` and `model`.

    Raises DataError for text that is unreadable or too small to train on.
    """
    settings = run.settings
    run.progress.phase("data", 3, "steps")
    found = load_corpus(settings.data, settings.data_dir)
    run.progress.advance(1, f"{len(found.documents)} documents, {found.num_bytes / 1e6:.2f} MB")
    run.stop.check()
    corpus, encoder, data = tokenized(run, found)
    run.progress.advance(1, f"vocabulary {encoder.vocab_size}")
    run.stop.check()
    data.save(run.folder / TOKENS)
    run.progress.advance(1, f"{data.train.numel()} training tokens")
    row: Row = {
        "kind": "data",
        "name": corpus.name,
        "source": corpus.source,
        "documents": len(found.documents),
        "bytes": corpus.num_bytes,
        "sha256": corpus.sha256,
        "tokens": data.sizes(),
        "vocab_size": encoder.vocab_size,
    }
    parameters = sum(parameter.numel() for parameter in run.new_model().parameters())
    name = settings.preset if settings.model_dir is None else settings.model_dir.name
    return [row, shape_row(name, run.shape, parameters)]


def tokenized(run: Run, corpus: Corpus) -> tuple[Corpus, Encoder, TokenData]:
    """The corpus as it is split, the encoder trained on its train split, and the tokens of the three splits.

    Split by document; within documents where a split would lack a window otherwise, unless the source has a split of
    its own. Raises DataError when that does not help either.
    """
    candidates = [corpus] if corpus.brings_split else [corpus, in_pieces(corpus)]
    shortage = f"{corpus.empty_splits()[0]} is empty" if corpus.empty_splits() else ""
    for candidate in candidates:
        if candidate.empty_splits():
            continue
        parts = candidate.split()
        encoder = encoder_of(run, texts(parts["train"]))
        data = TokenData(**{split: encoder.encode(texts(parts[split])) for split in SPLITS})
        name, size, need = data.shortest(run.shape.context)
        if size >= need:
            return candidate, encoder, data
        enough = corpus.num_bytes * need / max(1, size)
        shortage = f"the {name} split has {size:,} tokens, this model needs {need:,}: give about {enough:,.0f} bytes"
    raise DataError(
        f"{corpus.name} holds {corpus.num_bytes:,} bytes of text (documents: {len(corpus.documents)}), too little to "
        f"train on: {shortage}; give more text, or leave out --data"
    )


def encoder_of(run: Run, training_texts: Sequence[str]) -> Encoder:
    """The checkpoint's own tokenizer, or one trained on the train split and saved."""
    if run.settings.model_dir is not None:
        return PretrainedEncoder(run.settings.model_dir)
    encoder = train_encoder(training_texts, min(run.preset.tokenizer_vocabulary, run.shape.vocab_size))
    encoder.save(run.folder / TOKENIZER)
    return encoder
