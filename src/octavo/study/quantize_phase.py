"""Phase `ptq`: the baseline served in every form, without training: quality, memory, loading time, speed.

Each method is saved, loaded again from its file, and measured as loaded. Its rows are kept in `ptq/<method>.json` as
soon as it is done, so an interrupted phase loses one method at most.
"""

from __future__ import annotations

import copy
import time
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from octavo.study.atomic import read_json, write_json
from octavo.study.baseline_phase import baseline_model
from octavo.study.budget import fit
from octavo.study.checkpoint import load_tensors, save_weights
from octavo.study.evaluation import Evaluation
from octavo.study.generation import GenerationPlan, GenerationSpeed, measure_generation
from octavo.study.half_precision import half_products, needs_fp32_products
from octavo.study.layer_error import LayerSample, layer_error_rows, sample_layers
from octavo.study.record import Row, clean
from octavo.study.run import Run
from octavo.study.serving import ServingMethod, execution_of, linear_layers, model_bytes, serving_methods, weight_bytes
from octavo.study.transformer_engine import transformer_engine_reason, transformer_engine_row

PTQ = "ptq"
_ALWAYS = 2  # methods that are measured however late it is: 16 bits and row-wise
_CALIBRATION_BATCHES = 8
_EMULATION_COST = 4.0  # how much slower than 16 bits an emulated method may be, for planning only


def quantize_baseline(run: Run) -> list[Row]:
    """Measure every serving method; rows `ptq`, `layer_error`, `adjustment`."""
    methods = chosen_methods(run)
    reference = served_reference(run)
    tokens, rows = test_tokens(run, reference, len(methods))
    batches = calibration_batches(run)
    samples = sample_layers(reference, batches, lambda: serving_context(run))
    run.progress.phase(PTQ, len(methods) + 1, "methods")
    deadline = run.budget.seconds_for(PTQ)
    start = time.monotonic()
    for number, method in enumerate(methods):
        run.stop.check()
        if number >= _ALWAYS and deadline is not None and time.monotonic() - start > deadline:
            left = [each.key for each in methods[number:]]
            rows.append(_adjustment("methods", len(methods), number, f"no time left for {', '.join(left)}"))
            break
        done = measured(run, method, reference, samples, batches, tokens)
        rows.extend(done)
        run.progress.advance(1, f"{method.label}: perplexity {done[0]['perplexity']:.2f}")
    asked = run.settings.methods
    reason = transformer_engine_reason(run.device) if asked is None or "te" in asked else "not asked for"
    if reason is None:
        evaluate = run.evaluator("test", tokens)
        rows.append(transformer_engine_row(reference, evaluate, generation_plan(run), run.settings.seed))
    else:
        run.notes.append(f"no row of Transformer Engine: {reason}")
    run.progress.advance(1, reason or "Transformer Engine")
    return rows


def chosen_methods(run: Run) -> list[ServingMethod]:
    """The methods asked for, the 16-bit one always first."""
    methods = serving_methods(run.settings.dtype)
    asked = run.settings.methods
    return [method for key, method in methods.items() if asked is None or key in asked or key == run.settings.dtype]


def served_reference(run: Run) -> nn.Module:
    """The baseline in 16 bits, frozen, in eval mode."""
    return baseline_model(run).to(run.half).eval().requires_grad_(False)


def serving_context(run: Run) -> AbstractContextManager[object]:
    """What surrounds a served model's forward pass."""
    return half_products(run.device, run.half)


def calibration_batches(run: Run) -> list[torch.Tensor]:
    """Token batches of the train split, the same for every method."""
    batches = run.batches(run.settings.seed)
    return [batches(step)[0] for step in range(_CALIBRATION_BATCHES)]


def test_tokens(run: Run, reference: nn.Module, num_methods: int) -> tuple[int, list[Row]]:
    """How many test tokens every method is measured on: the preset's number, fewer under a time limit."""
    preset, context = run.preset, run.shape.context
    wanted = min(preset.test_tokens, (run.data.test.numel() - 1) // context * context)
    available = run.budget.seconds_for(PTQ)
    if available is None or run.is_decided("test-tokens"):
        (tokens,), rows = run.decided("test-tokens", [wanted], [])
        return tokens, rows
    per_batch = preset.evaluation_batch * context
    evaluate = run.evaluator("test", per_batch)
    start = time.monotonic()
    evaluate(reference, lambda: serving_context(run))
    cost = _EMULATION_COST if run.device.type == "cpu" else 1.5
    seconds = (time.monotonic() - start) / per_batch * context * cost * num_methods * 2  # half is for speed and layers
    least = min(wanted // context, preset.evaluation_batch)
    windows, rows = fit(wanted // context, seconds, available, phase=PTQ, what="windows of the test split", least=least)
    (tokens,), rows = run.decided("test-tokens", [windows * context], rows)
    return tokens, rows


def measured(
    run: Run,
    method: ServingMethod,
    reference: nn.Module,
    samples: dict[str, LayerSample],
    batches: list[torch.Tensor],
    tokens: int,
) -> list[Row]:
    """The rows of one method: from its file if an earlier start measured it, else by measuring."""
    path = run.folder / PTQ / f"{method.key}.json"
    if path.exists():
        stored: list[Row] = read_json(path)
        return stored
    names = list(linear_layers(reference))
    served = copy.deepcopy(reference)
    method.apply(served, batches)
    weights = run.folder / PTQ / f"{method.key}.safetensors"
    save_weights(served, weights)
    load_s = load_seconds(served, weights, run.device)
    result = run.evaluator("test", tokens)(served, lambda: serving_context(run))
    speed = measure_generation(served, generation_plan(run), lambda: serving_context(run))
    row = ptq_row(run, method, result, speed)
    row |= {"execution": execution_of(served)}
    row |= {"weight_bytes": weight_bytes(served, names), "model_bytes": model_bytes(served), "load_s": load_s}
    rows = [row]
    if method.key != run.settings.dtype:
        rows += layer_error_rows(method.key, samples, served, lambda: serving_context(run))
    rows = [clean(each) for each in rows]
    write_json(path, rows)
    return rows


def ptq_row(run: Run, method: ServingMethod, result: Evaluation, speed: GenerationSpeed | None) -> Row:
    """A `ptq` row without its sizes."""
    note = None
    if method.key == run.settings.dtype and needs_fp32_products(run.device, run.half):
        note = "this processor has no fast 16-bit products: they ran as fp32 products of rounded operands"
    return {
        "kind": "ptq",
        "method": method.key,
        "label": method.label,
        "weights": method.weights,
        "activations": method.activations,
        "perplexity": result.perplexity,
        "accuracy": result.accuracy,
        "loss": result.loss,
        "test_tokens": result.tokens,
        "ttft_s": speed.ttft_s if speed else None,
        "prefill_tokens_per_s": speed.prefill_tokens_per_s if speed else None,
        "decode_tokens_per_s": speed.decode_tokens_per_s if speed else None,
        "generation_batch": run.preset.generation_batch,
        "seed": run.settings.seed,
        "note": note,
    }


def load_seconds(served: nn.Module, path: Path, device: torch.device) -> float:
    """Median seconds to bring a served model's file into a model on `device`; leaves the loaded tensors in it.

    The file has just been written, so it comes from the page cache.
    """
    times = []
    for _ in range(3):
        start = time.perf_counter()
        load_tensors(served, load_file(path, device=str(device)), str(path))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return sorted(times)[1]


def generation_plan(run: Run) -> GenerationPlan:
    """Prompts of half the context from the test split, and as many tokens decoded as the preset says."""
    batch, context = run.preset.generation_batch, run.shape.context
    prompt = context // 2
    size = batch * prompt
    stream = run.data.test
    repeated = stream.repeat(-(-size // stream.numel()))[:size]
    return GenerationPlan(
        prompts=repeated.view(batch, prompt).long().to(run.device),
        new_tokens=min(context - prompt, run.preset.generation_tokens),
        repeats=run.preset.generation_repeats,
    )


def _adjustment(what: str, wanted: int, used: int, why: str) -> Row:
    return {"kind": "adjustment", "phase": PTQ, "what": what, "wanted": wanted, "used": used, "why": why}
