"""Structures of transformers that are known: the MLPs, and the normalisations before linear layers.

A structure is found by the names of its parts and recognised by the class that holds them. What an MLP's forward does
beyond them would be lost, so of its code the names it reads are compared, in their order, with those that are known: a
library's other version, which reads others, is left alone, and so is a class that somebody patched. A normalisation
keeps its own output, so that of the class around it the name is enough.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.conversion.known_parts import is_as_written, package_of

Path = tuple[str, ...]


class MLPStructure(NamedTuple):
    """An MLP whose layers are children of one module.

    Attributes:
        package, classes: where it is known from.
        first: the layer before the activation; of a gated MLP, gate and up.
        activation: between them.
        last: the layer behind it.
        reads: (class at a path, method) -> what its code reads, in order.
        between: what lies between the activation and the last layer, and has to be without effect.
        around: modules that are not called any more, beside these.
        method: what is computed as one.
        finish: of module, y and x, what the method does to y in the end.
    """

    package: str
    classes: tuple[str, ...]
    first: tuple[Path, ...]
    activation: Path
    last: Path
    reads: dict[tuple[Path, str], tuple[str, ...]]
    between: tuple[Path, ...] = ()
    around: tuple[Path, ...] = ()
    method: str = "forward"
    finish: Callable[[Any, Tensor, Tensor], Tensor] = lambda module, y, x: y

    @property
    def layers(self) -> tuple[Path, ...]:
        """The linear layers, in the order in which they run."""
        return (*self.first, self.last)

    @property
    def parts(self) -> tuple[Path, ...]:
        """All that is not called any more: layers, activation, what lies between, what is around."""
        return (*self.layers, self.activation, *self.between, *self.around)


class NormStructure(NamedTuple):
    """A normalisation and the linear layers that take its output, in one module.

    Attributes:
        package, classes: where it is known from.
        norm: the normalisation.
        followers: the layers, alternatives of versions included; those that are there count.
        reason: why it is left alone all the same.
    """

    package: str
    classes: tuple[str, ...]
    norm: Path
    followers: tuple[Path, ...]
    reason: str = ""


_DECODERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
_TIMM_BLOCKS = ("Block", "LayerScaleBlock")
_GATE_UP = (("mlp", "gate_proj"), ("mlp", "up_proj"))


def _qkv(*above: str) -> tuple[Path, ...]:
    return tuple((*above, name) for name in ("q_proj", "k_proj", "v_proj"))


MLPS = (
    MLPStructure(
        "transformers",
        ("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP"),
        (("gate_proj",), ("up_proj",)),
        ("act_fn",),
        ("down_proj",),
        {((), "forward"): ("down_proj", "act_fn", "gate_proj", "up_proj")},
    ),
    MLPStructure(
        "transformers",
        ("GPT2MLP",),
        (("c_fc",),),
        ("act",),
        ("c_proj",),
        {((), "forward"): ("c_fc", "act", "c_proj", "dropout")},
        finish=lambda module, y, x: module.dropout(y),
    ),
    MLPStructure(
        "transformers",
        ("ViTMLP",),
        (("fc1",),),
        ("activation_fn",),
        ("fc2",),
        {((), "forward"): ("fc1", "activation_fn", "fc2")},
    ),
    MLPStructure(
        "transformers",
        ("BertLayer",),
        (("intermediate", "dense"),),
        ("intermediate", "intermediate_act_fn"),
        ("output", "dense"),
        {
            ((), "feed_forward_chunk"): ("intermediate", "output"),
            (("intermediate",), "forward"): ("dense", "intermediate_act_fn"),
            (("output",), "forward"): ("dense", "dropout", "LayerNorm"),
        },
        around=(("intermediate",), ("output",)),
        method="feed_forward_chunk",
        finish=lambda module, y, x: module.output.LayerNorm(module.output.dropout(y) + x),
    ),
    MLPStructure(
        "timm",
        ("Mlp",),
        (("fc1",),),
        ("act",),
        ("fc2",),
        {((), "forward"): ("fc1", "act", "drop1", "norm", "fc2", "drop2")},
        between=(("drop1",), ("norm",)),
        finish=lambda module, y, x: module.drop2(y),
    ),
)

NORMS = (
    NormStructure("transformers", _DECODERS, ("input_layernorm",), _qkv("self_attn")),
    NormStructure("transformers", _DECODERS, ("post_attention_layernorm",), _GATE_UP),
    NormStructure("transformers", ("GPT2Block",), ("ln_1",), (("attn", "c_attn"),)),
    NormStructure("transformers", ("GPT2Block",), ("ln_2",), (("mlp", "c_fc"),)),
    NormStructure(
        "transformers",
        ("ViTLayer",),
        ("layernorm_before",),
        (*_qkv("attention"), *(("attention", "attention", name) for name in ("query", "key", "value"))),
    ),
    NormStructure("transformers", ("ViTLayer",), ("layernorm_after",), (("mlp", "fc1"), ("intermediate", "dense"))),
    NormStructure("timm", _TIMM_BLOCKS, ("norm1",), (("attn", "qkv"), *_qkv("attn"))),
    NormStructure("timm", _TIMM_BLOCKS, ("norm2",), (("mlp", "fc1"),)),
    NormStructure(
        "transformers",
        ("BertSelfOutput", "BertOutput"),
        ("LayerNorm",),
        (),
        "its output is the residual as well, and is kept in its own precision",
    ),
)


def part(module: Any, path: Path) -> Any:
    """What lies at a path of attributes; None if there is no such thing."""
    for name in path:
        module = getattr(module, name, None)
    return module


def is_octavos(kind: type[nn.Module]) -> bool:
    """True for a class of Octavo's own, or derived from one: what it can run as one, it does by itself."""
    return any(package_of(base) == "octavo" for base in kind.__mro__)


def is_known(structure: MLPStructure | NormStructure, kind: type[nn.Module]) -> bool:
    """True if a module of this class is the structure whose parts it has."""
    return package_of(kind) == structure.package and kind.__name__ in structure.classes


def class_reason(structure: MLPStructure | NormStructure, kind: type[nn.Module]) -> str:
    """Why a module of this class is not the structure whose parts it has; empty if it is."""
    if is_known(structure, kind):
        return ""
    if isinstance(structure, NormStructure):
        return f"the forward around it, of {kind.__name__}, is not one that is known here"
    *others, last = (".".join(path) for path in structure.layers)
    return f"its {', '.join(others)} and {last} look like an MLP's, but its forward is not one that is known here"


def code_reason(structure: MLPStructure, module: nn.Module, kind: type[nn.Module]) -> str:
    """Why the code of a module, whose class is `kind`, is not the one that is known; empty if it is."""
    for (path, method), reads in structure.reads.items():
        owner = type(part(module, path)) if path else kind
        code = getattr(inspect.unwrap(getattr(owner, method)), "__code__", None)
        if code is not None and code.co_names != reads:
            return f"{owner.__name__}.{method} reads {', '.join(code.co_names)}, where {', '.join(reads)} is known"
        if not is_as_written(owner, method):
            return f"{owner.__name__}.{method} was replaced on the class"
    return ""


def is_unchanged(structure: MLPStructure, module: nn.Module, kind: type[nn.Module]) -> bool:
    """True while the code of a module that was found to be the one that is known is it still; at every call."""
    for (path, method), reads in structure.reads.items():
        owner = type(part(module, path)) if path else kind
        if not is_as_written(owner, method):
            return False
        if not torch.compiler.is_compiling() and getattr(owner, method).__code__.co_names != reads:
            return False
    return True
