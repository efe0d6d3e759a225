"""docs/layers: the defaults that the tables of arguments state are those of the signatures."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import octavo

PAGES = Path(__file__).resolve().parents[2] / "docs" / "layers"
# Which callables a page's tables are of; an argument is looked up in the first that has it.
TABLES: dict[str, tuple[Any, ...]] = {
    "linear": (octavo.Linear,),
    "layernorm_linear": (octavo.LayerNormLinear,),
    "layernorm_mlp": (octavo.LayerNormMLP,),
    "grouped_linear": (octavo.GroupedLinear, octavo.TopKRouter),
    "dot_product_attention": (octavo.DotProductAttention,),
    "multihead_attention": (octavo.MultiheadAttention, octavo.RotaryPositionEmbedding),
    "transformer_layer": (octavo.TransformerLayer,),
    "cross_entropy": (octavo.LMHead, octavo.cross_entropy),
}
LITERAL = re.compile(r"None|True|False|-?[\d.]+(?:e-?\d+)?|\"[a-z_A-Z]+\"")


def stated(page: str) -> list[tuple[str, Any]]:
    """(argument, default) of every row whose defaults are literals, as many as arguments."""
    found: list[tuple[str, Any]] = []
    rows = (PAGES / f"{page}.md").read_text(encoding="utf-8").partition("| argument | default | meaning |")[2]
    for names, defaults in re.findall(r"^\| (`[^|]+`) \| ([^|]+) \|", rows, re.M):
        arguments = re.findall(r"\w+", names)
        values = [text.strip(" `").replace("\N{MINUS SIGN}", "-") for text in defaults.split(",")]
        if len(arguments) == len(values):
            pairs = zip(arguments, values, strict=True)
            found += [(name, eval(value)) for name, value in pairs if LITERAL.fullmatch(value)]
    return found


@pytest.mark.parametrize("page", TABLES)
def test_stated_defaults_are_those_of_the_signature(page: str) -> None:
    parameters: dict[str, inspect.Parameter] = {}
    for owner in reversed(TABLES[page]):
        parameters |= inspect.signature(owner).parameters
    defaults = stated(page)
    assert len(defaults) >= 1
    for name, value in defaults:
        assert parameters[name].default == value, name


def test_the_tables_are_read() -> None:
    assert ("attn_input_format", "sbhd") in stated("transformer_layer")
    assert ("ignore_index", -100) in stated("cross_entropy")
    assert ("eps", 1e-5) in stated("multihead_attention")
