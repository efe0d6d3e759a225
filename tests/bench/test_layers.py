"""One TransformerLayer in every hand, and a model built of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from octavo.bench import BenchSettings, run_bench
from octavo.bench.cases import layers as layers_case
from octavo.bench.layer_rivals import BuiltLayer, ComposedLayer, LayerRival, layer_rivals
from octavo.bench.models import CASES
from octavo.bench.peers import swap_layers_for_te, te_graphed
from octavo.bench.record import BenchRecord
from octavo.bench.session import Session
from octavo.bench.shapes import LAYERS, LayerShape
from octavo.bench.training import prepare_training
from octavo.bench.variants import apply_variant, parse_variant
from octavo.modules import TransformerLayer
from octavo.runtime import count_gemms

CPU = torch.device("cpu")
SMALL = LayerShape(16, 2, 64, 128, 4)
# Linears of a TransformerLayer: one each for q, k and v at once, the projection and both of the MLP.
PARTS = 4


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_run_measures_every_rival_that_is_here(tmp_path: Path) -> None:
    rows = run_bench(BenchSettings(out=tmp_path, device="cpu", only=("layers",)), command=[])
    found = {row["rival"]: row for row in rows if row["kind"] == "layer"}
    here = {"bf16", "bf16-composed", "octavo-delayed", "octavo-current", "octavo-rowwise", "octavo-block"}
    assert {key for key, row in found.items() if row["status"] == "measured"} == here
    assert found["te-delayed"]["reason"] == "Transformer Engine is measured on GPUs only"
    assert found["octavo-delayed-graphed"]["reason"] == "CUDA graphs need a GPU"
    for key in here:
        assert 0 < found[key]["ms_p10"] <= found[key]["ms"]
        assert found[key]["host_us"] > 0
        assert found[key]["per_s"] == pytest.approx(32e3 / found[key]["ms"], rel=1e-3)


def test_the_full_shapes_are_those_of_the_targets() -> None:
    assert {tuple(shape) for shape in LAYERS} == {
        (2048, 4, 4096, 16384, 32),
        (1024, 8, 768, 3072, 12),
        (256, 32, 1280, 5120, 16),
    }


def test_torchs_composition_is_the_layer_itself() -> None:
    """With the same parameters both compute the same, so that either may stand for BF16."""
    layer, composed = TransformerLayer(64, 128, 4), ComposedLayer(SMALL)
    own = dict(layer.named_parameters())
    qkv = "self_attention.layernorm_qkv."
    pairs = {"norm1": qkv + "layer_norm_", "norm2": "layernorm_mlp.layer_norm_", "proj": "self_attention.proj."}
    pairs |= {"fc1": "layernorm_mlp.fc1_", "fc2": "layernorm_mlp.fc2_"}
    with torch.no_grad():
        for kind in ("weight", "bias"):
            for name, prefix in pairs.items():
                getattr(getattr(composed, name), kind).copy_(own[prefix + kind])
            getattr(composed.qkv, kind).copy_(torch.cat([own[f"{qkv}{n}_{kind}"] for n in ("query", "key", "value")]))
    x = torch.randn(16, 2, 64)
    # The same products, summed in another order: float32 loses less than 1e-5 in ten of them.
    torch.testing.assert_close(composed(x), layer(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("key", ["bf16", "bf16-composed", "octavo-delayed", "octavo-block"])
def test_a_rival_runs_in_the_precision_that_its_name_says(key: str) -> None:
    rival = next(rival for rival in layer_rivals(CPU) if rival.key == key)
    x = torch.randn(16, 2, 64, dtype=torch.bfloat16)
    built = rival.build(SMALL, x)
    call = layers_case.step_call(built, x, torch.randn_like(x))
    with count_gemms() as counted:
        call()
    # Forward, and two products in the backward.
    assert counted.fp8 == (3 * PARTS if rival.library == "octavo" else 0)
    assert all(parameter.grad is not None for parameter in built.layer.parameters())


def test_a_rival_that_fails_is_a_row_and_memory_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's part is played: 5 GiB are there before, a build takes 2 more, a step 3 more for a while."""
    allocator = {"now": 5.0, "peak": 5.0}

    def hold(gib: float, released: bool) -> None:
        allocator["peak"] = max(allocator["peak"], allocator["now"] + gib)
        allocator["now"] += 0.0 if released else gib

    def build(shape: LayerShape, x: torch.Tensor) -> BuiltLayer:
        hold(9.0, released=True)  # while it is built
        hold(2.0, released=False)
        layer = nn.Identity()
        return BuiltLayer(lambda x: (hold(3.0, released=True), layer(x) * 1)[1], layer)

    def broken(shape: LayerShape, x: torch.Tensor) -> BuiltLayer:
        raise RuntimeError("no kernel image")

    rivals = [LayerRival("te-delayed", "te", "delayed", "", broken), LayerRival("bf16", "torch", "", "", build)]
    rivals.append(LayerRival("bf16-graphed", "torch", "", "graphed", build))
    monkeypatch.setattr(layers_case, "layer_rivals", lambda device: rivals)
    settings = BenchSettings(out=tmp_path, device="cpu")
    session: Any = Session(settings, BenchRecord(settings.record_path))
    session.on_gpu = True
    monkeypatch.setattr(Session, "synchronise", lambda self: None)
    monkeypatch.setattr(Session, "release", lambda self: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocator["now"] * 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: allocator["peak"] * 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: allocator["peak"] * 2**30)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: allocator.update(peak=allocator["now"]))
    layers_case._measure_shape(session, SMALL)
    found = {row["rival"]: row for row in session.record.rows}
    assert found["te-delayed"]["reason"] == "RuntimeError: no kernel image"
    assert found["bf16"]["peak_gib"] == 5.0  # 2 of the layer and 3 of a step
    assert found["bf16-graphed"]["peak_gib"] == 9.0  # a graph's memory is what its capture took


@pytest.mark.parametrize("key", ["bf16", "octavo-delayed"])
def test_a_model_of_layers_trains_in_fp8(key: str) -> None:
    training = prepare_training(CASES["vit-layers"], parse_variant(key), small=True, samples=4, device=CPU, seed=0)
    training.step()
    first = float(training.loss())
    for _ in range(10):
        training.step()
    assert float(training.loss()) < first
    assert training.layers == (0 if key == "bf16" else 2)
    with count_gemms() as counted:
        training.step()
    assert counted.fp8 == (0 if key == "bf16" else 2 * 3 * PARTS)


class TheirLayer(nn.Module):
    def __init__(self, *sizes: int, **options: Any) -> None:
        super().__init__()
        self.sizes, self.options = sizes, options


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Transformer Engine's part, played."""
    module: Any = ModuleType("transformer_engine.pytorch")
    module.TransformerLayer = TheirLayer
    module.autocast = lambda **options: nullcontext()
    graph: Any = ModuleType("transformer_engine.pytorch.graph")
    recipes: Any = ModuleType("transformer_engine.common.recipe")
    recipes.DelayedScaling = object
    graph.capturing = True
    graph.set_capture_end = lambda: setattr(graph, "capturing", False)
    for name, one in (("pytorch", module), ("pytorch.graph", graph), ("common.recipe", recipes)):
        monkeypatch.setitem(sys.modules, f"transformer_engine.{name}", one)
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    return module


def test_the_peers_layers_take_the_place_of_octavos_without_dropout(engine: Any) -> None:
    model = CASES["vit-layers"].build(CASES["vit-layers"].small)
    assert apply_variant(parse_variant("te-delayed"), model).layers == 2
    blocks: Any = model.blocks
    assert [type(block) for block in blocks] == [TheirLayer, TheirLayer]
    assert blocks[0].sizes == (64, 256, 2)
    options = blocks[0].options
    assert (options["hidden_dropout"], options["attention_dropout"]) == (0.0, 0.0)
    assert (options["self_attn_mask_type"], options["attn_input_format"]) == ("no_mask", "bshd")
    assert swap_layers_for_te(model) == 0


def test_torchao_is_not_measured_with_layers_that_it_does_not_have() -> None:
    model = CASES["vit-layers"].build(CASES["vit-layers"].small)
    with pytest.raises(ValueError, match="torchao has no TransformerLayer"):
        apply_variant(parse_variant("torchao-rowwise"), model)


def test_a_peers_graph_is_made_by_its_own_names(engine: Any) -> None:
    seen: list[Any] = []

    def newer(layer: Any, sample: Any, enabled: bool = False, recipe: Any = None, fp8_enabled: Any = None) -> Any:
        seen.append((enabled, recipe, fp8_enabled))
        return layer

    def older(layer: Any, sample: Any, fp8_enabled: bool = False, fp8_recipe: Any = None) -> Any:
        seen.append((fp8_enabled, fp8_recipe))
        return layer

    layer, x = TheirLayer(), torch.ones(1)
    for make in (newer, older):
        engine.make_graphed_callables = make
        for recipe in ("a recipe", None):
            assert te_graphed(layer, x, recipe) is layer
    assert seen == [(True, "a recipe", None), (False, None, None), (True, "a recipe"), (False, None)]


def test_a_peers_capture_that_fails_leaves_its_other_layers_alone(engine: Any) -> None:
    before = TheirLayer.__call__

    def failing(layer: Any, sample: Any, recipe: Any = None) -> Any:
        TheirLayer.__call__ = lambda self: None  # type: ignore[method-assign]
        raise RuntimeError("not permitted while capturing")

    engine.make_graphed_callables = failing
    with pytest.raises(RuntimeError, match="not permitted"):
        te_graphed(TheirLayer(), torch.ones(1), None)
    assert TheirLayer.__call__ is before
    assert not sys.modules["transformer_engine.pytorch.graph"].capturing  # type: ignore[attr-defined]
