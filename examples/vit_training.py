"""Training loop and record of the two vision-transformer examples; what is FP8 about them stands in the examples.

Images are random and few, so that a model can learn them by heart: the loss has to fall, and the same way in FP8 and
BF16. Matrix products outside of FP8 run in BF16 under torch.autocast; weights are float32.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import vit_model
from torch import Tensor, nn

import octavo


@dataclass
class Run:
    """What one training gave."""

    example: str
    precision: str
    preset: str
    model: str
    class_token: bool
    compiled: str
    tokens: int
    parameters: int
    batch_size: int
    device: str
    torch: str
    fp8_products_in_first_step: int | None
    losses: list[float] = field(default_factory=list)
    ms_per_step: float = float("nan")
    peak_memory_gib: float | None = None


def parse(description: str) -> argparse.Namespace:
    """The command line that both examples share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--preset", choices=sorted(vit_model.PRESETS), default="small")
    parser.add_argument("--class-token", action="store_true", help="one more token, instead of average pooling")
    parser.add_argument(
        "--compile",
        nargs="?",
        const="model",
        default="no",
        choices=["no", "model", "blocks"],
        help="torch.compile of the model as a whole (the default of the flag), or block by block",
    )
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=3, help="steps left out of the median time")
    parser.add_argument("--batch-size", type=int, help="default: the preset's")
    parser.add_argument("--lr", type=float, default=2e-4)
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--fp8", action="store_true", help="FP8 only; without this, BF16 follows for comparison")
    only.add_argument("--bf16", action="store_true", help="BF16 only")
    parser.add_argument("--json", type=Path, help="append one line for each training to this file")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.json is not None and not args.json.resolve().parent.is_dir():
        parser.error(f"--json {args.json}: there is no folder {args.json.resolve().parent}")
    return args


def precisions(args: argparse.Namespace) -> list[str]:
    """Which trainings the command line asks for."""
    return ["fp8"] if args.fp8 else ["bf16"] if args.bf16 else ["fp8", "bf16"]


def device() -> torch.device:
    """CUDA where there is a device, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def compiled(model: nn.Module, how: str) -> nn.Module:
    """The model as the command line wants it compiled."""
    if how == "model":
        return torch.compile(model)
    if how == "blocks":
        for block in vit_model.blocks_of(model):
            block.compile()
    return model


def train(
    example: str,
    precision: str,
    args: argparse.Namespace,
    model: nn.Module,
    *,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    after_backward: Callable[[nn.Module], None] = lambda model: None,
) -> Run:
    """Train `model`, which stands on its device, for `args.steps` steps.

    Args:
        example, precision: for the record.
        args: the command line.
        model: as the example swapped it, not yet compiled.
        context: entered around each forward.
        after_backward: called with the model between backward and optimizer step.
    """
    size = vit_model.PRESETS[args.preset]
    run = _described(example, precision, args, model, size)
    at = device()
    generator = torch.Generator().manual_seed(args.seed)
    images = torch.randn(run.batch_size, 3, size.img_size, size.img_size, generator=generator).to(at)
    labels = torch.randint(size.num_classes, (run.batch_size,), generator=generator).to(at)
    torch.compiler.reset()  # what was compiled for an earlier training would keep its weights alive
    gc.collect()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model = compiled(model, args.compile)
    times = []
    if at.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    for step in range(args.steps):
        start = time.perf_counter()
        counts = octavo.count_gemms() if step == 0 and args.compile == "no" else nullcontext(None)
        with counts as counted:
            loss = _step(model, images, labels, context)
            after_backward(model)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        _synchronise(at)
        times.append(time.perf_counter() - start)
        run.losses.append(loss.item())
        if counted is not None:
            run.fp8_products_in_first_step = counted.fp8
    run.ms_per_step = 1e3 * statistics.median(times[min(args.warmup, len(times) - 1) :])
    if at.type == "cuda":
        run.peak_memory_gib = torch.cuda.max_memory_allocated() / 2**30
    _report(run, args.json)
    return run


def compare(runs: list[Run]) -> None:
    """Say how the loss fell in FP8 and in BF16."""
    for run in runs:
        fell = run.losses[-1] < run.losses[0]
        print(
            f"{run.precision}: loss {run.losses[0]:.4f} -> {run.losses[-1]:.4f}, {'fell' if fell else 'DID NOT FALL'}"
        )
    if len(runs) == 2:
        apart = max(abs(a - b) for a, b in zip(runs[0].losses, runs[1].losses, strict=True))
        print(f"largest difference of the loss between FP8 and BF16 over the run: {apart:.4f}")


def _step(
    model: nn.Module, images: Tensor, labels: Tensor, context: Callable[[], AbstractContextManager[Any]]
) -> Tensor:
    with torch.autocast(images.device.type, dtype=torch.bfloat16), context():
        logits = model(images)
    loss = nn.functional.cross_entropy(logits.float(), labels)
    loss.backward()
    return loss.detach()


def _described(
    example: str, precision: str, args: argparse.Namespace, model: nn.Module, size: vit_model.ViTSize
) -> Run:
    at = device()
    return Run(
        example=example,
        precision=precision,
        preset=args.preset,
        model=vit_model.name_of(model),
        class_token=args.class_token,
        compiled=args.compile,
        tokens=size.num_patches + args.class_token,
        parameters=sum(p.numel() for p in model.parameters()),
        batch_size=args.batch_size or size.batch_size,
        device=torch.cuda.get_device_name() if at.type == "cuda" else "cpu (FP8 is emulated: its time is no speed)",
        torch=torch.__version__,
        fp8_products_in_first_step=None,
    )


def _synchronise(at: torch.device) -> None:
    if at.type == "cuda":
        torch.cuda.synchronize()


def _report(run: Run, path: Path | None) -> None:
    print(
        f"{run.precision} | {run.model}, {run.parameters / 1e6:.1f} M parameters, {run.tokens} tokens, batch", end=" "
    )
    print(f"{run.batch_size}, compile: {run.compiled}, {run.device}")
    print("  loss   " + " ".join(f"{loss:.4f}" for loss in run.losses))
    memory = "" if run.peak_memory_gib is None else f", peak memory {run.peak_memory_gib:.2f} GiB"
    print(f"  median {run.ms_per_step:.1f} ms a step{memory}")
    if run.fp8_products_in_first_step is not None:
        print(f"  {run.fp8_products_in_first_step} FP8 products in the first step")
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(run)) + "\n")
