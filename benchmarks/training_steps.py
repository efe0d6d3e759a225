"""What a training step on a CUDA device must not do: wait for the device, or let memory grow.

Parts of `check_training.py`.
"""

from __future__ import annotations

import functools
import gc
from pathlib import Path
from typing import Any

import torch
from benchmarks.training_model import (
    RECIPES,
    SMALL,
    WARM_UP,
    Mode,
    Setting,
    Training,
    no_synchronisation,
    random_batch,
)

import octavo
from octavo.recipes import Recipe

Result = dict[str, Any]


def check_synchronisation(checks: Any) -> None:
    """No recipe waits for the device in a step, eager or compiled, nor does the explicit update."""
    checks.run("synchronisation is noticed", notices_synchronisation)
    modes: tuple[Mode, ...] = ("eager", "blocks", "whole")
    for name, recipe in RECIPES.items():
        for mode in modes:
            if mode != "whole" or name == "delayed":
                checks.run(
                    "no synchronisation", functools.partial(step_waits_not, recipe, mode), recipe=name, mode=mode
                )
    checks.run("no synchronisation", update_waits_not, recipe="delayed", mode="update_scales")


def notices_synchronisation() -> Result:
    """The check itself: reading one number from the device must raise."""
    number = torch.ones((), device="cuda")
    try:
        with no_synchronisation():
            number.item()
    except RuntimeError:
        return {"ok": True}
    return {"ok": False, "error": "item() went unnoticed"}


def step_waits_not(recipe: Recipe | None, mode: Mode) -> Result:
    """Two steps after the warm-up."""
    torch._dynamo.reset()
    setting = Setting()
    training, batch = Training(recipe, mode, setting), random_batch(setting)
    for _ in range(WARM_UP):
        training.step(*batch)
    with no_synchronisation():
        for _ in range(2):
            training.step(*batch)
    return {"ok": bool(training.loss.isfinite()), "converted": training.converted}


def update_waits_not() -> Result:
    """Steps of a converted model without a context, `octavo.update_scales` after each."""
    setting = Setting()
    recipe = RECIPES["delayed"]
    training, batch = Training(recipe, "eager", setting), random_batch(setting)
    training.recipe = None  # the layers have it as their own

    def step() -> None:
        training.step(*batch)
        octavo.update_scales(training.model)

    for _ in range(WARM_UP):
        step()
    # (A scale comes from the largest of the history, and may stay.)
    state = training.model.blocks[0].up.delayed_state.weight
    before = state.history.clone()
    with no_synchronisation():
        for _ in range(2):
            step()
    moved = not torch.equal(before, state.history)
    return {"ok": moved, "history_moved": moved}


def check_memory(checks: Any) -> None:
    """500 steps leave memory where it was: eager, compiled, captured; with the recipe that has state, and without."""
    ways: tuple[tuple[str, Mode], ...] = (
        ("delayed", "eager"),
        ("delayed", "blocks"),
        ("delayed", "captured"),
        ("current", "eager"),
    )
    for name, mode in ways:
        checks.run("no growth", functools.partial(memory_stays, RECIPES[name], mode), recipe=name, mode=mode)


def memory_stays(recipe: Recipe, mode: Mode, steps: int = 500, every: int = 100) -> Result:
    """Allocated bytes, Python objects and the process's resident pages, from step 100 on.

    The device's bytes may not grow at all: each step allocates and frees the same. Nor may the number of objects: one a
    step would make 400. The host's pages come and go with Python's own arenas (1 MiB each) and the driver's buffers;
    1 KiB a step would show as 400 KiB, so what is allowed is four arenas.
    """
    torch._dynamo.reset()
    setting = Setting(shape=SMALL, steps=steps)
    training, batch = Training(recipe, mode, setting), random_batch(setting)
    samples = []
    for step in range(1, steps + 1):
        training.step(*batch)
        if step % every == 0:
            torch.cuda.synchronize()
            gc.collect()
            samples.append((torch.cuda.memory_allocated(), len(gc.get_objects()), resident_bytes()))
    device, objects, pages = (max(values[1:]) - values[0] for values in zip(*samples, strict=True))
    # The list of samples itself grows by a tuple each.
    ok = device <= 0 and objects < every and pages <= 4 << 20
    return {"ok": ok, "device_bytes": device, "objects": objects, "host_bytes": pages, "steps": steps}


def resident_bytes() -> int:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096
