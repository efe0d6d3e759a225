"""Phase `data`: read the text, split it by document, train the tokenizer on the train split, store token streams."""

from __future__ import annotations

from octavo.study.corpus import load_corpus
from octavo.study.documents import SPLITS, texts
from octavo.study.record import Row
from octavo.study.run import TOKENIZER, TOKENS, Run, shape_row
from octavo.study.tokenizer import train_encoder
from octavo.study.tokens import TokenData


def prepare_data(run: Run) -> list[Row]:
    """Write tokenizer.json and tokens.safetensors; the rows `data` and `model`.

    Raises DataError for unreadable text and ValueError for text too short to split.
    """
    settings, preset = run.settings, run.preset
    run.progress.phase("data", 3, "steps")
    corpus = load_corpus(settings.data, settings.data_dir)
    parts = corpus.split()
    run.progress.advance(1, f"{len(corpus.documents)} documents, {corpus.num_bytes / 1e6:.2f} MB")
    run.stop.check()
    encoder = train_encoder(texts(parts["train"]), min(preset.tokenizer_vocabulary, run.shape.vocab_size))
    encoder.save(run.folder / TOKENIZER)
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
    return [row, shape_row(settings.preset, run.shape, parameters)]
