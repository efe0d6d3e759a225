"""A local transformers checkpoint in the place of the study's own model, with the tokenizer that came with it.

transformers' `Conv1D` (GPT-2's linear layer, its weight transposed) becomes an `nn.Linear` of the same numbers, so that
every method of the study applies to it.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from octavo.study.model import ModelShape


class PretrainedError(ValueError):
    """The checkpoint cannot be used; the message says why."""


def check_checkpoint(folder: Path) -> None:
    """Raise PretrainedError when `folder` is no transformers checkpoint, or transformers is absent."""
    if importlib.util.find_spec("transformers") is None:
        raise PretrainedError("--model needs transformers, which is not installed: pip install octavo[transformers]")
    if not (folder / "config.json").is_file():
        raise PretrainedError(f"--model {folder}: no config.json there; give a folder saved by save_pretrained")


def pretrained_shape(folder: Path, most_context: int) -> ModelShape:
    """The shape of a checkpoint, with at most `most_context` tokens of context."""
    config = _transformers().AutoConfig.from_pretrained(folder, local_files_only=True)
    positions = getattr(config, "max_position_embeddings", None) or most_context
    return ModelShape(
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        heads=config.num_attention_heads,
        context=min(positions, most_context),
        vocab_size=config.vocab_size,
    )


class PretrainedModel(nn.Module):
    """A causal model of transformers with the interface of `GPT`: forward(tokens, cache), new_cache, head_name."""

    def __init__(self, model: Any) -> None:
        """Wrap `model`; its Conv1D layers are replaced."""
        super().__init__()
        self.model = model
        replace_conv1d(model)
        head = model.get_output_embeddings()
        names = [name for name, module in self.named_modules() if module is head]
        self.head_name = names[0] if names else ""
        parameters = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"

    def new_cache(self, batch: int) -> Any:
        """An empty cache of transformers; it grows by itself to any batch."""
        return _transformers().DynamicCache()

    def forward(self, tokens: torch.Tensor, cache: Any = None) -> torch.Tensor:
        """Logits [B, T, V] of int64 tokens [B, T]; with a cache, of tokens that follow those seen before."""
        output = self.model(input_ids=tokens, use_cache=cache is not None, **{self._cache_argument: cache})
        logits: torch.Tensor = output.logits
        return logits


def load_pretrained(folder: Path) -> PretrainedModel:
    """The checkpoint in fp32 on the CPU."""
    model = _transformers().AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return PretrainedModel(model)


def replace_conv1d(model: nn.Module) -> None:
    """Put an `nn.Linear` of the same numbers in the place of each Conv1D."""
    conv1d = importlib.import_module("transformers.pytorch_utils").Conv1D
    for name, module in list(model.named_modules()):
        if isinstance(module, conv1d):
            rows, columns = module.weight.shape
            linear = nn.Linear(int(rows), int(columns), bias=module.bias is not None)
            with torch.no_grad():
                linear.weight.copy_(module.weight.t())
                if module.bias is not None:
                    linear.bias.copy_(module.bias)
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, linear)


class PretrainedEncoder:
    """The tokenizer of a checkpoint as the study's `Encoder`."""

    def __init__(self, folder: Path) -> None:
        """Load it. Raises PretrainedError when the folder has none."""
        try:
            self.tokenizer = _transformers().AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise PretrainedError(f"--model {folder} has no tokenizer that transformers can read ({error})") from error

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return len(self.tokenizer)

    def encode(self, texts: Sequence[str]) -> torch.Tensor:
        """All texts as one int32 stream, the end-of-text token after each where there is one: [tokens]."""
        stream: list[int] = []
        end = self.tokenizer.eos_token_id
        for tokens in self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]:
            stream.extend(tokens)
            if end is not None:
                stream.append(end)
        return torch.tensor(stream, dtype=torch.int32)


def _transformers() -> Any:
    return importlib.import_module("transformers")
