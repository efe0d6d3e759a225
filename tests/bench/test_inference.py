"""Served models: what is measured of them, in which forms, by whom, and how that is judged."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.bench import BenchSettings, joined_records, run_bench, serving_measures
from octavo.bench.cases import inference as case
from octavo.bench.cuda_graphs import CudaGraphs
from octavo.bench.derived import restated
from octavo.bench.models import CASES
from octavo.bench.peers import serve_with_te, serve_with_torchao
from octavo.bench.record import BenchRecord
from octavo.bench.serving import Decoder, Prefill, cache_argument
from octavo.bench.serving_floors import Cost
from octavo.bench.serving_rivals import (
    Served,
    ServingRival,
    linear_shapes,
    model_bytes,
    serving_rivals,
    with_linears,
)
from octavo.bench.session import Session
from octavo.runtime import count_gemms
from tests.bench import rows as made

pytest.importorskip("transformers")
CPU = torch.device("cpu")
FROZEN = ["octavo-rowwise", "octavo-tensor_static", "octavo-tensor_dynamic"]
DECODING = ["bf16", "octavo-rowwise", "octavo-tensor_static", "fp16", "octavo-tensor_dynamic"]
HERE = [*DECODING[:4], "octavo-delayed-converted", DECODING[4], "octavo-rowwise-converted"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model_of(key: str) -> Any:
    torch.manual_seed(0)
    return CASES[key].build(CASES[key].small).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    settings = BenchSettings(out=tmp_path_factory.mktemp("bench"), device="cpu", only=("inference",))
    return run_bench(settings, command=[])


def of(rows: list[dict[str, Any]], **fields: Any) -> list[dict[str, Any]]:
    found = [row for row in rows if row["kind"] == "inference"]
    return [row for row in found if all(row.get(key) == value for key, value in fields.items())]


@pytest.mark.parametrize(("model", "layers"), [("llama", 7), ("gpt2", 4)])
def test_a_run_measures_every_form_of_every_rival_that_is_here(
    rows: list[dict[str, Any]], model: str, layers: int
) -> None:
    assert of(rows, status="failed") == []
    for phase, batch in (("prefill", 1), ("decode", 1), ("decode", 2), ("first token", 1)):
        found = {row["rival"]: row for row in of(rows, model=model, phase=phase, batch=batch, status="measured")}
        assert list(found) == [*(DECODING if phase == "decode" else HERE), "bf16-again"], (phase, batch)
        for key, row in found.items():
            assert 0 < row["ms_p10"] <= row["ms"] <= row["ms_p90"]
            assert row["converted"] == (layers if key.startswith("octavo") else 0)
            assert row["native"] is (False if key in FROZEN else None)
            assert row["speedup"] == pytest.approx(found["bf16"]["ms"] / row["ms"])
        (replayed,) = of(rows, model=model, phase=phase, batch=batch, graph="replayed")
        assert replayed["reason"] == "CUDA graphs need a GPU"
    # 16 tokens of a prompt; one of each sequence.
    for row in (*of(rows, phase="prefill", status="measured"), *of(rows, phase="decode", status="measured")):
        things = row["batch"] * (16 if row["phase"] == "prefill" else 1)
        assert row["per_s"] == pytest.approx(1e3 * things / row["ms"], rel=1e-3)
        assert row["floor_ms"] > 0
    assert [row["rival"] for row in of(rows, model=model, phase="loading")] == ["bf16", "octavo-rowwise"]
    (peer,) = of(rows, model=model, rival="te-current")
    assert peer["reason"] == "Transformer Engine is measured on GPUs only"


def test_weights_of_half_as_many_bytes_are_told(rows: list[dict[str, Any]]) -> None:
    held = {row["rival"]: row["weight_bytes"] for row in of(rows, model="llama", phase="prefill", status="measured")}
    weights = sum(k * n for k, n in linear_shapes(model_of("llama")))
    assert held["bf16"] - held["octavo-tensor_dynamic"] == weights - 4 * 7  # a byte each; a scale for each of 7
    assert held["octavo-tensor_static"] - held["octavo-tensor_dynamic"] == 4 * 7  # of their inputs
    assert held["fp16"] == held["bf16"] == held["octavo-rowwise-converted"]


@contextmanager
def logits_of(model: Any) -> Iterator[list[Tensor]]:
    seen: list[Tensor] = []
    handle = model.register_forward_hook(lambda module, arguments, out: seen.append(out.logits[:, -1]))
    yield seen
    handle.remove()


@pytest.mark.parametrize("key", ["llama", "gpt2"])
def test_a_cache_of_fixed_size_gives_what_the_whole_forward_gives(key: str) -> None:
    model = model_of(key)
    prompts = torch.randint(0, 64, (2, 6))
    prefill, decoder = Prefill(model, prompts), Decoder(model, prompts, tokens=12)
    assert decoder.room == 6
    for _ in range(2):  # and again, from the end of the prompts
        decoder.reset()
        with logits_of(model) as seen:
            prefill()
            tokens = [decoder.token.clone()]
            for _ in range(decoder.room):
                decoder.step()
                tokens.append(decoder.token.clone())
        assert torch.equal(prefill.token[:, None], tokens[0])
        whole = torch.cat([prompts, *tokens], 1)
        for place, logits in enumerate(seen):
            with torch.no_grad():
                expected = model(input_ids=whole[:, : 6 + place], use_cache=False).logits[:, -1]
            # The same sums in another order: float32 loses less than 1e-5 in a model of one layer.
            torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
            assert torch.equal(expected.argmax(-1, keepdim=True), tokens[place])


def test_a_prompt_that_is_changed_in_place_is_what_is_read() -> None:
    model = model_of("llama")
    prompts, other = torch.randint(0, 64, (2, 2, 6)).unbind()
    prefill = Prefill(model, prompts)
    before = prefill.token.clone()
    prompts.copy_(other)
    prefill()
    assert torch.equal(prefill.token, Prefill(model, other).token)
    assert not torch.equal(prefill.token, before)


class _NoWaiting(TorchDispatchMode):
    """What reads a value on the host cannot be captured."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("key", ["llama", "gpt2"])
@pytest.mark.parametrize("rival", [one for one in serving_rivals(CPU) if one.reason is None], ids=lambda one: one.key)
def test_nothing_in_a_call_waits_for_the_device(key: str, rival: ServingRival) -> None:
    prompts = torch.randint(0, 64, (2, 6))
    served = rival.serve(model_of(key).bfloat16(), prompts)
    prefill, decoder = Prefill(served.model, prompts), Decoder(served.model, prompts, tokens=12)
    with _NoWaiting():
        prefill()
        decoder.step()
        with pytest.raises(AssertionError, match="waits"):
            bool(prefill.token.sum() > 0)


def test_a_cache_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="prompts of 6 tokens fill a cache of 6"):
        Decoder(model_of("llama"), torch.zeros(1, 6, dtype=torch.int64), tokens=6)


def test_the_cache_is_given_by_the_name_that_the_model_knows() -> None:
    class Older:
        def forward(self, input_ids: Any, past_key_values: Any = None) -> None: ...

    class Newer:
        def forward(self, input_ids: Any, cache: Any = None, **kwargs: Any) -> None: ...

    assert (cache_argument(Older()), cache_argument(Newer())) == ("past_key_values", "cache")


@pytest.mark.parametrize("rival", [one for one in serving_rivals(CPU) if one.reason is None], ids=lambda one: one.key)
def test_a_rival_runs_in_the_precision_that_its_name_says(rival: ServingRival) -> None:
    model = model_of("llama").bfloat16()
    before = copy.deepcopy(model.state_dict())
    served = rival.serve(model, torch.randint(0, 64, (1, 8)))
    with count_gemms() as counted:
        Prefill(served.model, torch.randint(0, 64, (2, 6)), served.context)
    assert counted.fp8 == served.layers == (7 if rival.library == "octavo" else 0)
    assert (rival.cost.weight_bits == 8) == (rival.key in FROZEN)
    assert (rival.cost == Cost()) == (rival.library == "torch")
    assert served.model.lm_head.weight.dtype == (torch.float16 if rival.key == "fp16" else torch.bfloat16)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_delayed_scales_are_those_of_the_prompts_and_stay_while_the_model_is_served() -> None:
    rival = next(one for one in serving_rivals(CPU) if one.key == "octavo-delayed-converted")
    prompts = torch.randint(0, 64, (1, 8))
    served = rival.serve(model_of("llama").bfloat16(), prompts)

    def scales() -> dict[str, float]:
        ends = ("input_scale", "weight_scale")
        return {name: float(value) for name, value in served.model.state_dict().items() if name.endswith(ends)}

    before = scales()
    assert len(before) == 2 * 7
    assert all(math.isfinite(scale) for scale in before.values())
    Prefill(served.model, torch.randint(0, 64, (2, 6)))
    assert scales() == before
    assert not served.model.training


def test_linears_stand_for_conv1d_and_give_the_same() -> None:
    model = model_of("gpt2")
    tokens = torch.randint(0, 64, (2, 6))
    with torch.no_grad():
        expected = model(input_ids=tokens, use_cache=False).logits
        swapped = with_linears(copy.deepcopy(model))
        found = swapped(input_ids=tokens, use_cache=False).logits
    # The same products of float32, summed in another order.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert linear_shapes(swapped) == linear_shapes(model) == [(64, 192), (64, 64), (64, 256), (256, 64)]
    assert sum(isinstance(module, nn.Linear) for module in swapped.modules()) == 5


def test_bytes_of_tied_weights_count_once() -> None:
    embedding, head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
    head.weight = embedding.weight
    assert model_bytes(nn.ModuleList([embedding, head])) == 8 * 4 * 4


def test_a_rival_that_fails_is_a_row_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(model: nn.Module, prompts: Tensor) -> Served:
        raise RuntimeError("no kernel image")

    def breaking(model: Any, prompts: Tensor) -> Served:
        served = copy.deepcopy(model)
        served.forward = broken
        return Served(served, 3)

    usual = serving_rivals(CPU)[:1]
    rivals = [ServingRival(key, "te", "current", "tensor", Cost(), serve) for key, serve in
              (("te-broken", broken), ("te-breaking", breaking))]  # fmt: skip
    monkeypatch.setattr(case, "serving_rivals", lambda device: [*rivals, *usual])
    settings = BenchSettings(out=tmp_path, device="cpu", only=("inference",), models=("gpt2",))
    found = run_bench(settings, command=[])
    (row,) = of(found, rival="te-broken")
    assert (row["status"], row["reason"]) == ("failed", "RuntimeError: no kernel image")
    failed = of(found, rival="te-breaking")
    assert {row["phase"] for row in failed} == {"prefill", "decode", "first token"}
    assert {row["status"] for row in failed} == {"failed"}
    assert len(of(found, rival="bf16", status="measured")) == 5
    assert {row["model"] for row in of(found)} == {"gpt2"}


def test_on_a_device_no_prompt_is_longer_than_the_positions(tmp_path: Path) -> None:
    settings = BenchSettings(out=tmp_path, device="cpu")
    session: Any = Session(settings, BenchRecord(settings.record_path))
    session.on_gpu = True
    prompts = {}
    for key in case.MODELS:
        forms = case.forms_of(session, CASES[key].sizes)
        prompts[key] = [(form.batch, form.tokens) for form in forms if form.phase == "prefill" and form.graph]
        decoded = [form for form in forms if form.phase == "decode"]
        assert [(form.batch, bool(form.graph)) for form in decoded] == [(1, True), (32, True), (1, False), (32, False)]
        assert all(form.tokens + form.steps <= form.cache for form in decoded)
    assert prompts == {"llama": [(1, 2048), (8, 1024)], "gpt2": [(1, 1024), (8, 1024)]}


class PlayedGraphs:
    """A device's part: calls are recorded, and run anew when they are replayed."""

    def capture(self, calls: Sequence[Any]) -> Any:
        for one in calls:
            one()
        return lambda: [one() for one in calls]

    def seconds(self, replay: Any) -> float:
        replay()
        return 1.0


def test_with_a_device_every_form_is_replayed_and_memory_is_a_rivals_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device's part is played: 7 GiB are there, of other rivals too, and a call takes 2 more for a while."""
    monkeypatch.setattr(serving_measures, "CudaGraphs", PlayedGraphs)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 7 * 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 9 * 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 9 * 2**30)
    for name in ("reset_peak_memory_stats", "empty_cache", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *arguments: None)
    settings = BenchSettings(out=tmp_path, device="cpu", quick=True)
    session: Any = Session(settings, BenchRecord(settings.record_path))
    session.on_gpu = True
    monkeypatch.setattr(case, "_ON_GPU", case._ON_CPU)
    gpt2 = replace(CASES["gpt2"], sizes=CASES["gpt2"].small)
    case.measure_model(session, gpt2, {"kind": "inference", "model": "gpt2"})
    rows = session.record.rows
    assert of(rows, status="failed") == []
    for phase, ms, per_s in (("prefill", 1000.0, 16.0), ("decode", 250.0, 4.0)):
        found = {row["rival"]: row for row in of(rows, phase=phase, graph="replayed")}
        assert list(found) == [*(DECODING if phase == "decode" else HERE), "bf16-again"]
        assert all((row["ms"], row["per_s"]) == (ms, per_s) for row in found.values())
        assert found["bf16"]["peak_gib"] == pytest.approx(2 + found["bf16"]["weight_bytes"] / 2**30, abs=1e-3)
    assert len(of(rows, phase="first token", graph="replayed", status="measured")) == len(HERE) + 1


@pytest.mark.gpu
@pytest.mark.parametrize("key", DECODING)
def test_a_replay_decodes_what_eager_decoding_does(key: str) -> None:
    device = torch.device("cuda")
    rival = next(one for one in serving_rivals(device) if one.key == key)
    model = model_of("llama").bfloat16().to(device)
    prompts = torch.randint(0, 64, (2, 6), device=device)
    served = rival.serve(model, prompts)
    decoder = Decoder(served.model, prompts, tokens=16, context=served.context)

    def decoded(step: Any) -> list[list[int]]:
        decoder.reset()
        found = []
        for _ in range(8):
            step()
            found.append(decoder.token.flatten().tolist())
        return found

    eager = decoded(decoder.step)
    # The same kernels on the same numbers.
    assert decoded(CudaGraphs().capture([decoder.step])) == eager


def test_what_the_time_limit_leaves_out_is_a_row(tmp_path: Path) -> None:
    settings = BenchSettings(out=tmp_path, device="cpu", only=("inference",), models=("gpt2",), time_limit_s=1e-6)
    (row,) = of(run_bench(settings, command=[]))
    assert (row["model"], row["status"]) == ("gpt2", "skipped")
    assert "time limit: 0 s left" in row["reason"]
    (other,) = of(run_bench(BenchSettings(out=tmp_path / "vit", device="cpu", only=("inference",), models=("vit",)),
                            command=[]))  # fmt: skip
    assert other["reason"] == "--models names none that is served here: llama, gpt2"


def test_served_models_of_two_records_are_put_together_by_model(tmp_path: Path) -> None:
    for name, ms in (("one", 2.0), ("two", 3.0)):
        record = BenchRecord(tmp_path / name / "record.jsonl")
        record.append(made.run())
        record.append(made.served("bf16", ms))
        if name == "one":
            record.append(made.served("bf16", ms, model="gpt2"))
    joined = of(joined_records([tmp_path / "one", tmp_path / "two"]))
    assert {row["model"]: row["ms"] for row in joined} == {"llama": 3.0, "gpt2": 2.0}


def test_torchao_is_asked_for_dynamic_fp8_of_all_but_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, list[str]]] = []

    def quantize(model: nn.Module, config: Any, filter_fn: Any) -> None:
        asked.append((config.granularity, [name for name, one in model.named_modules() if filter_fn(one, name)]))

    module: Any = ModuleType("torchao.quantization")
    module.PerRow, module.PerTensor = (lambda: "row"), (lambda: "tensor")
    module.Float8DynamicActivationFloat8WeightConfig = lambda granularity: SimpleNamespace(granularity=granularity)
    module.quantize_ = quantize
    monkeypatch.setitem(sys.modules, "torchao.quantization", module)
    assert serve_with_torchao(model_of("llama"), "rowwise") == 7
    assert serve_with_torchao(with_linears(model_of("gpt2")), "tensorwise") == 4
    assert [(granularity, len(names)) for granularity, names in asked] == [("row", 7), ("tensor", 4)]
    assert not any("lm_head" in name for _, names in asked for name in names)


def test_transformer_engine_is_given_fp8_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[bool] = []
    state = SimpleNamespace(quantized=False)

    @contextmanager
    def quantized(enabled: bool, recipe: object) -> Iterator[None]:
        state.quantized = enabled
        yield
        state.quantized = False

    class TheirLinear(nn.Module):
        def __init__(self, inputs: int, outputs: int, bias: bool, params_dtype: Any, device: Any) -> None:
            super().__init__()
            inside.append(state.quantized)
            self.weight, self.bias = nn.Parameter(torch.empty(outputs, inputs)), nn.Parameter(torch.empty(outputs))

    engine: Any = ModuleType("transformer_engine.pytorch")
    engine.Linear, engine.fp8_model_init = TheirLinear, quantized
    engine.autocast = lambda **options: nullcontext()
    recipes: Any = ModuleType("transformer_engine.common.recipe")
    recipes.Float8CurrentScaling = object
    for name, one in (("pytorch", engine), ("common.recipe", recipes)):
        monkeypatch.setitem(sys.modules, f"transformer_engine.{name}", one)
    model = model_of("llama")
    layers, context = serve_with_te(model, "current")
    assert (layers, inside) == (7, [True] * 7)
    with context():
        assert isinstance(model.model.layers[0].mlp.up_proj, TheirLinear)


def test_speed_is_beside_bf16_of_the_same_form_and_the_floor_from_the_runs_ceilings() -> None:
    ceilings = [{"kind": "ceiling", "name": name, "shape": [1], "per_s": rate} for name, rate in
                (("copy", 4e12), ("bf16", 5e14), ("fp8_row", 1e15))]  # fmt: skip
    rows = [*ceilings, made.served("bf16", 10.0), made.served("octavo-rowwise", 8.0)]
    rows.append(made.served("octavo-rowwise", 8.0, batch=8))
    half, whole, other = restated(rows)[3:]
    assert (half["speedup"], whole["speedup"], "speedup" in other) == (1.0, 1.25, False)
    # 4 TFLOP at 500 or 1000 TFLOP/s, and 4 GB of casts at 4 TB/s.
    assert (half["floor_ms"], whole["floor_ms"]) == (pytest.approx(8.0), pytest.approx(5.0))
