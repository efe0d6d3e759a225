"""A model without memory, from a description on this disk: a transformers config, or a name that timm knows.

It is built on the meta device: shapes, no numbers. Nothing is downloaded, and no code that lies beside a config is run.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo.bench.advice.error import AdviceError

DEFAULT_SEQUENCE = 2048
_NOT_FUSED = (
    "transformers has no fused attention for this model: what attention keeps is counted as its eager code keeps it."
)
_LABELS_OF_TOKENS = re.compile(r"LMHead|CausalLM|MaskedLM|ConditionalGeneration|TokenClassification")
_LABELS_OF_SAMPLES = re.compile(r"ImageClassification|SequenceClassification")


@dataclass(frozen=True)
class Described:
    """A model on the meta device and how it is run.

    Attributes:
        name: for the reader.
        model: in training mode, float32.
        sequence: tokens of a sample of text; None where the input is an image.
        forward: of the number of samples; runs the model and its loss.
        embeddings: ids of the weights that are looked up, not multiplied.
        head: id of the output layer's weight, or None.
        remark: what the reader should know of how it was built; may be empty.
    """

    name: str
    model: nn.Module
    sequence: int | None
    forward: Callable[[int], object]
    embeddings: frozenset[int]
    head: int | None
    remark: str = ""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' remarks about a config, which are not about the advice, from the terminal."""
    if importlib.util.find_spec("transformers") is None:
        yield
        return
    log: Any = importlib.import_module("transformers.utils.logging")
    before = log.get_verbosity()
    log.set_verbosity_error()
    try:
        yield
    finally:
        log.set_verbosity(before)


def describe(source: str, sequence: int | None = None) -> Described:
    """Build the model that `source` names.

    Args:
        source: a folder with a config.json, such a file, or a model name of timm's.
        sequence: tokens of a sample; None for the model's context, up to 2048.

    Raises:
        AdviceError: there is no such thing, it cannot be built, or the sequence does not fit.
    """
    path = Path(source)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        if path.is_dir():
            raise AdviceError(f"--model {source}: no config.json there; give a folder saved by save_pretrained")
        return _of_timm(source, {}, sequence)
    config = _read(file)
    if "architecture" in config and "model_type" not in config:
        return _of_timm(str(config["architecture"]), config.get("model_args") or {}, sequence)
    return _of_transformers(source, config, sequence)


def _read(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise AdviceError(f"--model {file} is no JSON that can be read: {error}; give a model's config.json") from error
    if not isinstance(config, dict) or not ("model_type" in config or "architecture" in config):
        raise AdviceError(
            f"--model {file} has no model_type: it is not the config.json of a transformers or timm model"
        )
    return config


def _of_transformers(source: str, config: dict[str, Any], sequence: int | None) -> Described:
    transformers = _imported("transformers", "pip install octavo[transformers]")
    rest = {key: value for key, value in config.items() if key not in ("model_type", "auto_map", "quantization_config")}
    kind = config["model_type"]
    try:
        settings = transformers.AutoConfig.for_model(kind, **rest)
        settings.use_cache = False
        model, remark = _built(transformers, settings)
    except Exception as error:  # whatever a class of somebody else's raises for a config that does not fit it
        own = "; its own code (auto_map) is not run" if "auto_map" in config else ""
        raise AdviceError(
            f"--model {source}: transformers {transformers.__version__} cannot build a {kind!r}{own}:"
            f" {_first_line(error)}"
        ) from error
    text = getattr(settings, "text_config", None) or settings
    if getattr(model, "main_input_name", "") == "pixel_values" and not hasattr(text, "vocab_size"):
        if sequence is not None:
            raise AdviceError(
                f"--sequence {sequence}: {source} takes images, whose size says how many tokens there are"
            )
        return _described(source, model, None, _image_arguments(settings), remark)
    if not hasattr(text, "vocab_size") or model.main_input_name in ("input_features", "input_values"):
        raise AdviceError(f"--model {source}: its input is {model.main_input_name!r}; advice knows tokens and images")
    stated = getattr(text, "max_position_embeddings", None)
    context = stated if isinstance(stated, int) and stated > 0 else None  # XLNet has -1, for any length
    length = sequence or min(context or DEFAULT_SEQUENCE, DEFAULT_SEQUENCE)
    if context is not None and length > context:
        raise AdviceError(f"--sequence {length}: the context of {source} is {context} tokens; give that or less")
    return _described(source, model, length, _token_arguments(settings, length), remark)


def _built(transformers: Any, settings: Any) -> tuple[nn.Module, str]:
    """The class that the config names, a causal model or a bare one if it names none; and a remark on its attention."""
    named = [getattr(transformers, name, None) for name in getattr(settings, "architectures", None) or ()]

    def build() -> nn.Module:
        with torch.device("meta"):
            if named and named[0] is not None:
                model: nn.Module = named[0](settings)
            elif type(settings) in transformers.AutoModelForCausalLM._model_mapping:
                model = transformers.AutoModelForCausalLM.from_config(settings)
            else:
                model = transformers.AutoModel.from_config(settings)
        return model

    settings._attn_implementation = "sdpa"
    try:
        return build(), ""
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
    settings._attn_implementation = "eager"
    return build(), _NOT_FUSED


def _token_arguments(settings: Any, length: int) -> Callable[[str, set[str], int], dict[str, Tensor]]:
    def arguments(name: str, known: set[str], samples: int) -> dict[str, Tensor]:
        tokens = torch.zeros(samples, length, dtype=torch.long, device="meta")
        found = {"input_ids": tokens}
        if getattr(settings, "is_encoder_decoder", False):
            found["decoder_input_ids"] = tokens
        if "labels" in known and _LABELS_OF_TOKENS.search(name):
            found["labels"] = tokens
        elif "labels" in known and _LABELS_OF_SAMPLES.search(name):
            found["labels"] = tokens[:, 0]
        return found

    return arguments


def _image_arguments(settings: Any) -> Callable[[str, set[str], int], dict[str, Tensor]]:
    size = settings.image_size
    height, width = size if isinstance(size, (list, tuple)) else (size, size)

    def arguments(name: str, known: set[str], samples: int) -> dict[str, Tensor]:
        found = {"pixel_values": torch.zeros(samples, settings.num_channels, height, width, device="meta")}
        if "labels" in known and _LABELS_OF_SAMPLES.search(name):
            found["labels"] = torch.zeros(samples, dtype=torch.long, device="meta")
        return found

    return arguments


def _described(
    source: str,
    model: Any,
    length: int | None,
    arguments: Callable[[str, set[str], int], dict[str, Tensor]],
    remark: str,
) -> Described:
    known = set(inspect.signature(model.forward).parameters)

    def forward(samples: int) -> object:
        given = arguments(type(model).__name__, known, samples)
        dtype = next(model.parameters()).dtype
        output = model(**{key: value.to(dtype) if value.is_floating_point() else value for key, value in given.items()})
        loss = getattr(output, "loss", None)
        return output[0].float().sum() if loss is None else loss

    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    head_id = None if head is None or not hasattr(head, "weight") else id(head.weight)
    return Described(source, model.train(), length, forward, _looked_up(model), head_id, remark)


def _of_timm(name: str, arguments: dict[str, Any], sequence: int | None) -> Described:
    if importlib.util.find_spec("timm") is None:
        raise AdviceError(
            f"--model {name}: no such folder or config.json, and timm, whose model it may be, is not installed;"
            " nothing is downloaded"
        )
    try:
        timm: Any = importlib.import_module("timm")
    except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision that was built for another torch
        raise AdviceError(f"--model {name}: timm is installed and does not import: {_first_line(error)}") from error
    if not timm.is_model(name):
        raise AdviceError(
            f"--model {name}: no such folder or config.json, and no model of timm {timm.__version__} is called so;"
            " nothing is downloaded"
        )
    if sequence is not None:
        raise AdviceError(f"--sequence {sequence}: {name} takes images, whose size says how many tokens there are")
    with torch.device("meta"):
        model = timm.create_model(name, pretrained=False, **arguments)
    channels, height, width = model.default_cfg["input_size"]
    patches = getattr(model, "patch_embed", None)
    height, width = getattr(patches, "img_size", None) or (height, width)

    def forward(samples: int) -> object:
        dtype = next(model.parameters()).dtype
        logits = model(torch.zeros(samples, channels, height, width, device="meta", dtype=dtype))
        labels = torch.zeros(samples, dtype=torch.long, device="meta")
        return nn.functional.cross_entropy(logits, labels)

    head = model.get_classifier()
    return Described(
        name, model.train(), None, forward, _looked_up(model), id(head.weight) if isinstance(head, nn.Linear) else None
    )


def _looked_up(model: nn.Module) -> frozenset[int]:
    return frozenset(id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding))


def _imported(name: str, remedy: str) -> Any:
    if importlib.util.find_spec(name) is None:
        raise AdviceError(f"--model needs {name}, which is not installed: {remedy}")
    return importlib.import_module(name)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:200]
