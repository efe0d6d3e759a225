"""The peers are not here: stand-ins with their names show that what is asked of them is right."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from octavo.bench import peers

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def forget_what_was_imported() -> None:
    peers._import_reason.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, names: dict[str, dict[str, Any]]) -> None:
    for name, members in names.items():
        module = ModuleType(name)
        module.__spec__ = sys.__spec__  # find_spec asks for one
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)


class TELinear(nn.Linear):
    def __init__(self, n: int, m: int, bias: bool, params_dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(n, m, bias, dtype=params_dtype, device=device)


def stand_in_te(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    entered: list[Any] = []

    def autocast(enabled: bool, recipe: object) -> AbstractContextManager[None]:
        entered.append(recipe)
        return nullcontext()

    recipes = {name: (lambda name=name: name) for name in peers.TE_RECIPES.values()}
    install(
        monkeypatch,
        {
            "transformer_engine": {},
            "transformer_engine.pytorch": {"Linear": TELinear, "autocast": autocast},
            "transformer_engine.common": {},
            "transformer_engine.common.recipe": recipes,
        },
    )
    return entered


def test_peers_are_measured_on_gpus_where_they_import(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peers.peer_reason("te", CPU) == "Transformer Engine is measured on GPUs only"
    assert peers.peer_reason("torchao", CUDA) == "torchao is not installed"
    stand_in_te(monkeypatch)
    assert peers.peer_reason("te", CUDA) is None


def test_a_broken_build_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, {"transformer_engine": {}})

    def broken(name: str) -> None:
        raise OSError("libcublas.so.13 not found")

    monkeypatch.setattr(peers.importlib, "import_module", broken)
    reason = peers.peer_reason("te", CUDA)
    assert reason == "Transformer Engine does not import (OSError: libcublas.so.13 not found)"


def test_te_layers_have_the_same_weights_and_run_in_its_context(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = stand_in_te(monkeypatch)
    model = nn.ModuleDict({"block": nn.Sequential(nn.Linear(16, 32), nn.Linear(30, 16)), "head": nn.Linear(16, 16)})
    before = model["block"][0].weight.clone()
    assert peers.swap_for_te(model) == 1  # neither the head nor what is no multiple of 16
    swapped = model["block"][0]
    assert isinstance(swapped, TELinear)
    assert torch.equal(swapped.weight, before)
    with peers.te_context(peers.te_recipe("block"))():
        pass
    assert entered == ["Float8BlockScaling"]


def test_the_older_name_of_te_s_context_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_te(monkeypatch)
    calls = []

    def fp8_autocast(enabled: bool, fp8_recipe: object) -> AbstractContextManager[None]:
        calls.append(fp8_recipe)
        return nullcontext()

    engine = sys.modules["transformer_engine.pytorch"]
    monkeypatch.delattr(engine, "autocast")
    monkeypatch.setattr(engine, "fp8_autocast", fp8_autocast, raising=False)
    with peers.te_context("recipe")():
        assert calls == ["recipe"]


def test_torchao_is_given_its_recipe_and_the_layers_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []

    class Config:
        @staticmethod
        def from_recipe_name(name: str) -> str:
            return f"config of {name}"

    def convert(model: nn.Module, config: str, module_filter_fn: Any) -> None:
        taken.extend((config, name) for name, module in model.named_modules() if module_filter_fn(module, name))

    install(
        monkeypatch,
        {
            "torchao": {},
            "torchao.float8": {"Float8LinearConfig": Config, "convert_to_float8_training": convert},
        },
    )
    model = nn.ModuleDict({"proj": nn.Linear(16, 16), "lm_head": nn.Linear(16, 16)})
    assert peers.convert_for_torchao(model, "rowwise") == 1
    assert taken == [("config of rowwise", "proj")]
