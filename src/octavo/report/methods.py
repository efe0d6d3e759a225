"""How a method looks, everywhere on the page: name, family, colour, dash, marker and place in the order.

Colours are those of Okabe and Ito (2008), which readers with any common colour blindness tell apart. They are given as
tokens (``@blue``) that the page's style sheet defines for light and for dark. FP8 has the cool ones, integers the warm
ones, 16 bits the ink of the text. Static scales without training and delayed scaling in training are the same idea and
share a colour, and so do dynamic and current.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Method:
    """One method's identity. ``family`` is "16-bit", "FP8" or "INT"."""

    key: str
    label: str
    family: str
    color: str
    dash: str
    symbol: str
    order: int


_KNOWN = [
    Method("bf16", "BF16", "16-bit", "@ink", "solid", "circle", 0),
    Method("fp16", "FP16", "16-bit", "@ink", "dot", "circle-open", 1),
    Method("delayed", "FP8 delayed", "FP8", "@blue", "solid", "square", 10),
    Method("current", "FP8 current", "FP8", "@sky", "dash", "diamond", 11),
    Method("rowwise", "FP8 row-wise", "FP8", "@green", "longdash", "triangle-up", 12),
    Method("block", "FP8 block 128", "FP8", "@purple", "dashdot", "cross", 13),
    Method("mxfp8", "MXFP8", "FP8", "@yellow", "dot", "star", 14),
    Method("te", "FP8 by Transformer Engine", "FP8", "@grey", "longdashdot", "hexagon", 15),
    Method("int8", "INT8", "INT", "@orange", "dash", "triangle-down", 20),
    Method("int4", "INT4 weights", "INT", "@vermillion", "dot", "x", 21),
]

_LABEL_WITHOUT_TRAINING = {"delayed": "FP8 tensor, static", "current": "FP8 tensor, dynamic"}

# A method's key is matched by the first of these words that it contains.
_WORDS = [
    ("bf16", "bf16"),
    ("bfloat16", "bf16"),
    ("baseline", "bf16"),
    ("fp16", "fp16"),
    ("transformer_engine", "te"),
    ("int8", "int8"),
    ("w8a8_int", "int8"),
    ("int4", "int4"),
    ("mxfp8", "mxfp8"),
    ("mx", "mxfp8"),
    ("block", "block"),
    ("row", "rowwise"),
    ("channel", "rowwise"),
    ("static", "delayed"),
    ("delayed", "delayed"),
    ("calibrated", "delayed"),
    ("dynamic", "current"),
    ("current", "current"),
]

_BY_KEY = {method.key: method for method in _KNOWN}


def counterpart(key: str) -> str:
    """The name shared by the forms of one idea: ``tensor_static`` and ``delayed`` both give ``delayed``."""
    plain = key.lower().replace("-", "_").replace(" ", "_")
    if plain == "te" or plain.startswith("te_"):
        return "te"
    return next((name for word, name in _WORDS if word in plain), plain)


def method(key: str, label: str = "") -> Method:
    """The look of the method ``key``; ``label``, if given, is the name for people."""
    found = _BY_KEY.get(counterpart(key))
    if found is None:
        found = Method(key, key or "unnamed", "FP8", "@grey", "dot", "circle-open", 30)
    return replace(found, key=key, label=label or found.label)


def without_training(key: str, label: str = "") -> Method:
    """As :func:`method`, named as a method that quantizes a finished model."""
    return method(key, label or _LABEL_WITHOUT_TRAINING.get(counterpart(key), ""))
