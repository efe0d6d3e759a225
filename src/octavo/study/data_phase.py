"""Phase `data`: read the text, split it by document, train the tokenizer on the train split, store token streams."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.study.corpus import load_corpus
from octavo.study.documents import SPLITS, texts
from octavo.study.pretrained import PretrainedEncoder
from octavo.study.record import Row
from octavo.study.run import TOKENIZER, TOKENS, Run, shape_row
from octavo.study.tokenizer import Encoder, train_encoder
from octavo.study.tokens import TokenData


def prepare_data(run: Run) -> list[Row]:
    """Write tokenizer.json and tokens.safetensors; the rows `data` and `model`.

    Raises DataError for unreadable text and ValueError for text too short to split.
    """
    settings = run.settings
    run.progress.phase("data", 3, "steps")
    corpus = load_corpus(settings.data, settings.data_dir)
    parts = corpus.split()
    run.progress.advance(1, f"{len(corpus.documents)} documents, {corpus.num_bytes / 1e6:.2f} MB")
    run.stop.check()
    encoder = encoder_of(run, texts(parts["train"]))
    run.progress.advance(1, f"vocabulary {encoder.vocab_size}")
    run.stop.check()
    data = TokenData(**{split: encoder.encode(texts(parts[split])) for split in SPLITS})
    data.require(run.shape.context)
    data.save(run.folder / TOKENS)
    run.progress.advance(1, f"{data.train.numel()} training tokens")
    row: Row = {
        "kind": "data",
        "name": corpus.name,
        "source": corpus.source,
        "documents": len(corpus.documents),
        "bytes": corpus.num_bytes,
        "sha256": corpus.sha256,
        "tokens": data.sizes(),
        "vocab_size": encoder.vocab_size,
    }
    parameters = sum(parameter.numel() for parameter in run.new_model().parameters())
    name = settings.preset if settings.model_dir is None else settings.model_dir.name
    return [row, shape_row(name, run.shape, parameters)]


def encoder_of(run: Run, training_texts: Sequence[str]) -> Encoder:
    """The checkpoint's own tokenizer, or one trained on the train split and saved."""
    if run.settings.model_dir is not None:
        return PretrainedEncoder(run.settings.model_dir)
    encoder = train_encoder(training_texts, min(run.preset.tokenizer_vocabulary, run.shape.vocab_size))
    encoder.save(run.folder / TOKENIZER)
    return encoder
