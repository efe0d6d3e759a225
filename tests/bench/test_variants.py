from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from octavo.bench.models import CASES
from octavo.bench.settings import MODELS
from octavo.bench.training import prepare_training
from octavo.bench.variants import ON_CPU, ON_GPU, Variant, apply_variant, parse_variant, variant_reason
from octavo.modules import FP8LinearMixin, TransformerLayer

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("bf16", ("torch", "", "", "")),
        ("bf16-compiled", ("torch", "", "blocks", "")),
        ("octavo-delayed-compiled-captured", ("octavo", "delayed", "blocks", "captured")),
        ("octavo-current-whole", ("octavo", "current", "whole", "")),
        ("octavo-delayed-reduced", ("octavo", "delayed", "reduced", "")),
        ("octavo-delayed-lean-compiled-captured", ("octavo", "delayed", "blocks", "captured")),
        ("bf16-lean-compiled", ("torch", "", "blocks", "")),
        ("octavo-delayed-head-lean-reduced", ("octavo", "delayed", "reduced", "")),
        ("octavo-delayed-linears-reduced", ("octavo", "delayed", "reduced", "")),
        ("te-block", ("te", "block", "", "")),
        ("torchao-rowwise-compiled", ("torchao", "rowwise", "blocks", "")),
        ("octavo-rowwise-graphed", ("octavo", "rowwise", "", "graphed")),
    ],
)
def test_a_name_says_library_recipe_and_launch(key: str, expected: tuple[str, ...]) -> None:
    variant = parse_variant(key)
    assert (variant.library, variant.recipe, variant.compiled, variant.graph) == expected
    assert variant.key == key
    assert variant.lean == ("-lean" in key)
    assert variant.head == ("-head" in key)
    assert variant.linears == ("-linears" in key)


@pytest.mark.parametrize(
    "key",
    [
        "fp8",
        "octavo",
        "octavo-tensorwise",
        "bf16-fast",
        "te-rowwise",
        "te-block-lean",
        "bf16-linears",
        "bf16-head",
        "te-block-head",
        "torch",
        "",
    ],
)
def test_an_unknown_name_is_refused_with_what_names_are_made_of(key: str) -> None:
    with pytest.raises(ValueError, match="is unknown: write bf16, octavo-RECIPE"):
        parse_variant(key)


def test_the_usual_variants_are_names() -> None:
    assert len({parse_variant(key) for key in ON_GPU}) == len(ON_GPU)
    assert all(parse_variant(key).graph == "" for key in ON_CPU)


def test_peers_and_graphs_need_a_gpu() -> None:
    assert "GPUs only" in (variant_reason(parse_variant("te-delayed"), CPU) or "")
    assert "GPU" in (variant_reason(parse_variant("bf16-captured"), CPU) or "")
    assert variant_reason(parse_variant("octavo-delayed"), CPU) is None


def test_octavo_leaves_the_head_as_it_is() -> None:
    model = nn.ModuleDict({"body": nn.Linear(32, 32), "lm_head": nn.Linear(32, 32)})
    assert apply_variant(parse_variant("octavo-current"), model).layers == 1
    assert isinstance(model["body"], FP8LinearMixin)
    assert type(model["lm_head"]) is nn.Linear


def test_the_head_is_converted_where_a_variant_says_so() -> None:
    for key, layers in (("octavo-current", 1), ("octavo-current-head", 2)):
        model = nn.ModuleDict({"body": nn.Linear(32, 32), "lm_head": nn.Linear(32, 32)})
        assert apply_variant(parse_variant(key), model).layers == layers


@pytest.mark.parametrize("word", ["head", "linears"])
def test_transformer_layers_refuse_what_they_cannot_be(word: str) -> None:
    model = nn.ModuleDict({"body": TransformerLayer(32, 64, 2), "head": nn.Linear(32, 32)})
    with pytest.raises(ValueError, match="leave out -head and -linears"):
        apply_variant(parse_variant(f"octavo-current-{word}"), model)


def test_of_linears_alone_nothing_is_fused() -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama", reason="an MLP that convert knows by class")
    for key, fused in (("octavo-current-compiled", True), ("octavo-current-linears-compiled", False)):
        model = nn.Sequential(llama.LlamaMLP(llama.LlamaConfig(hidden_size=32, intermediate_size=64)))
        kind = type(model[0])
        assert apply_variant(parse_variant(key), model).layers == 3
        assert (type(model[0]) is not kind) == fused


def test_of_a_lean_variant_octavo_makes_inputs_again_or_the_compiler_does() -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    apply_variant(parse_variant("octavo-delayed-lean-compiled"), model)
    assert model[0].recipe.saved_input == "high_precision"
    with apply_variant(parse_variant("octavo-delayed-lean-compiled"), nn.Sequential(nn.Linear(32, 32))).context():
        assert torch._functorch.config.ban_recompute_materialized_backward
    converted = apply_variant(parse_variant("bf16-lean-compiled"), nn.Linear(32, 32))
    assert torch._functorch.config.ban_recompute_materialized_backward
    with converted.context():
        assert not torch._functorch.config.ban_recompute_materialized_backward
    assert torch._functorch.config.ban_recompute_materialized_backward


def test_a_variant_that_converts_nothing_is_not_measured_as_one() -> None:
    with pytest.raises(ValueError, match="octavo converts no layer"):
        apply_variant(parse_variant("octavo-current"), nn.ModuleDict({"head": nn.Linear(32, 32)}))


def test_every_model_of_the_settings_is_defined() -> None:
    assert set(CASES) == set(MODELS)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads that wait for busy cores would take most of the time of so small a model."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("key", ["bf16", "octavo-delayed", "octavo-current"])
def test_training_lowers_the_loss(key: str) -> None:
    pytest.importorskip("transformers")
    training = prepare_training(CASES["gpt2"], parse_variant(key), small=True, samples=2, device=CPU, seed=0)
    training.step()
    first = float(training.loss())
    for _ in range(20):
        training.step()
    assert float(training.loss()) < first
    assert training.layers == (0 if key == "bf16" else 4)  # GPT-2's block has four, its head stays
    assert training.parameters > 0


def test_without_graphs_of_its_own_octavo_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.delattr("octavo.runtime.make_graphed_callables", raising=False)
    variant = Variant("octavo-current-graphed", "octavo", "current", graph="graphed")
    with pytest.raises(NotImplementedError, match="no make_graphed_callables"):
        prepare_training(CASES["gpt2"], variant, small=True, samples=1, device=CPU, seed=0)


def test_octavos_graphs_are_made_of_the_whole_model_and_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    seen = []

    def make(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> nn.Module:
        seen.append((batch, torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()))
        return model

    monkeypatch.setattr("octavo.runtime.make_graphed_callables", make, raising=False)
    variant = parse_variant("octavo-delayed-graphed")
    training = prepare_training(CASES["gpt2"], variant, small=True, samples=1, device=CPU, seed=0)
    training.step()
    (batch, enabled, cached), *others = seen
    assert not others
    assert (len(batch), enabled, cached) == (2, True, False)
