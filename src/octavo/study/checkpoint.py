"""Weights as safetensors, and checkpoints of a training run that are there whole or not at all.

A checkpoint is a folder `checkpoint-<step>`: `model.safetensors`, `optimizer.pt` (tensors and plain values only, so it
loads with `weights_only=True`) and `state.json`. It is written under a temporary name and renamed; then older ones go.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from octavo.study.atomic import read_json, replacing, write_json

Tensors = dict[str, torch.Tensor]


def own_tensors(model: nn.Module) -> Tensors:
    """The state dict with tied tensors once, under their first name, contiguous."""
    seen: set[tuple[int, torch.dtype, int]] = set()
    tensors: Tensors = {}
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tensor.dtype, tensor.numel())
        if tensor.numel() and tensor.device.type != "meta" and key in seen:
            continue
        seen.add(key)
        tensors[name] = tensor.detach().contiguous()
    return tensors


def save_weights(model: nn.Module, path: Path) -> None:
    """Write the model's tensors as safetensors, first to a temporary name."""
    with replacing(path) as temporary:
        save_file(own_tensors(model), temporary)


def load_weights(model: nn.Module, path: Path) -> None:
    """Copy the tensors of `path` into the model. Raises ValueError naming keys that are missing or too many."""
    load_tensors(model, load_file(path), str(path))


def load_tensors(model: nn.Module, tensors: Tensors, source: str) -> None:
    """Copy named tensors into the model, where names of tied weights may be absent. Raises ValueError naming keys."""
    result = model.load_state_dict(tensors, strict=False)
    tied = set(model.state_dict()) - set(own_tensors(model))
    missing = [name for name in result.missing_keys if name not in tied]
    if missing or result.unexpected_keys:
        raise ValueError(f"{source} does not fit the model: missing {missing}, unexpected {result.unexpected_keys}")


@dataclass(frozen=True)
class Checkpoint:
    """A training run at the end of one step; `state` is JSON (rows so far, best loss …)."""

    step: int
    model: Tensors
    optimizer: dict[str, Any]
    state: dict[str, Any]

    def save(self, folder: Path) -> None:
        """Write it below `folder` and remove older ones."""
        final = folder / f"checkpoint-{self.step:08d}"
        temporary = folder / f".{final.name}.{os.getpid()}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            save_file(self.model, temporary / "model.safetensors")
            torch.save(self.optimizer, temporary / "optimizer.pt")
            write_json(temporary / "state.json", self.state)
            shutil.rmtree(final, ignore_errors=True)
            temporary.replace(final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        for old in _folders(folder):
            if old != final:
                shutil.rmtree(old, ignore_errors=True)

    @classmethod
    def latest(cls, folder: Path) -> Checkpoint | None:
        """The newest checkpoint below `folder`, tensors on the CPU, or None."""
        folders = _folders(folder)
        if not folders:
            return None
        path = folders[-1]
        return cls(
            step=int(path.name.rpartition("-")[2]),
            model=load_file(path / "model.safetensors"),
            optimizer=torch.load(path / "optimizer.pt", map_location="cpu", weights_only=True),
            state=read_json(path / "state.json"),
        )


def discard(folder: Path) -> None:
    """Remove the checkpoints of a run that has ended."""
    for path in _folders(folder):
        shutil.rmtree(path, ignore_errors=True)


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("checkpoint-*") if path.is_dir())
