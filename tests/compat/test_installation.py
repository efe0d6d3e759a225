"""install: code written for another library runs with its own import lines. Each case in an interpreter of its own."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

import octavo.compat

SOURCE = Path(__file__).resolve().parents[2] / "src"


def python(code: str, *, at: Path | None = None) -> str:
    paths = [str(SOURCE), *([str(at)] if at else [])]
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


THEIR_CODE = """
import transformer_engine
import transformer_engine.pytorch as te
from transformer_engine.common import recipe
from transformer_engine.common.recipe import DelayedScaling, Format
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager, fp8_autocast
from quickstart_utils import BasicMLP, cast_to_representable
import torch

my_linear = te.Linear(768, 768, bias=True)
inp = torch.rand((1024, 768))
fp8_recipe = recipe.DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=16, amax_compute_algo="max")
with te.fp8_autocast(enabled=True, fp8_recipe=fp8_recipe):
    assert FP8GlobalStateManager.get_fp8_recipe() is fp8_recipe
    out_fp8 = my_linear(inp)
loss_fp8 = out_fp8.mean()
loss_fp8.backward()
assert my_linear.weight.grad.shape == (768, 768)
assert isinstance(my_linear, transformer_engine.pytorch.Linear)
"""


def test_transformer_engines_tutorial_runs_unchanged() -> None:
    python(f"import octavo.compat\noctavo.compat.install('transformer_engine')\n{THEIR_CODE}")


def test_without_install_the_library_is_not_there() -> None:
    python(
        """
import octavo.compat, octavo.compat.transformer_engine.pytorch
try:
    import transformer_engine
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("found")
"""
    )


def test_float8_experimentals_code_runs_unchanged() -> None:
    python(
        """
import octavo.compat
octavo.compat.install("float8_experimental")
import float8_experimental.config as config
from float8_experimental.float8_linear import Float8Linear
from float8_experimental.float8_dynamic_linear import Float8DynamicLinear
from float8_experimental.float8_linear_utils import (
    swap_linear_with_float8_linear, sync_float8_amax_and_scale_history)
import octavo.compat.float8_experimental.config as own
import torch
from torch import nn

config.enable_pre_and_post_forward = False
assert own.enable_pre_and_post_forward is False, "one switch under two names"
model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
swap_linear_with_float8_linear(model, Float8Linear)
model(torch.randn(4, 32)).sum().backward()
sync_float8_amax_and_scale_history(model)
"""
    )


def test_integrations_find_a_package_and_its_version() -> None:
    """What Accelerate and Lightning ask: the spec of the package, the metadata of its distribution."""
    out = python(
        """
import importlib.metadata as metadata, importlib.util as util
import octavo.compat
octavo.compat.install("transformer_engine")
for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.common.recipe"):
    assert util.find_spec(name) is not None, name
print(metadata.version("transformer_engine"), metadata.version("transformer-engine"))
print(metadata.metadata("transformer-engine")["Name"], *metadata.packages_distributions()["transformer_engine"])
import transformer_engine
print(transformer_engine.__version__)
assert metadata.version("torch")
"""
    )
    assert out.split() == ["2.9.0", "2.9.0", "transformer-engine", "transformer-engine", "2.9.0"]


def test_uninstall_leaves_nothing_behind() -> None:
    python(
        """
import importlib.metadata as metadata, sys
import octavo.compat
before, finders = set(sys.modules), list(sys.meta_path)
octavo.compat.install("transformer_engine")
octavo.compat.install("transformer_engine")
import transformer_engine.pytorch as te
octavo.compat.uninstall("transformer_engine")
octavo.compat.uninstall("transformer_engine")
left = {name for name in set(sys.modules) - before if name.split(".")[0] in ("transformer_engine", "quickstart_utils")}
assert not left, left
assert sys.meta_path == finders
try:
    metadata.version("transformer-engine")
except metadata.PackageNotFoundError:
    pass
else:
    raise SystemExit("version still answered")
te.Linear(8, 8, device="cpu")  # what was imported keeps working
"""
    )


def test_a_library_that_is_imported_already_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text("")
    out = python(
        """
import sys
import transformer_engine
import octavo.compat
theirs = transformer_engine
try:
    octavo.compat.install("transformer_engine")
except RuntimeError as error:
    print(error)
assert sys.modules["transformer_engine"] is theirs
assert "transformer_engine.pytorch" not in sys.modules
""",
        at=tmp_path,
    )
    assert "transformer_engine is already imported, from" in out
    assert str(tmp_path) in out


def test_unknown_libraries_are_named() -> None:
    with pytest.raises(ValueError, match=r"no names for 'apex': octavo\.compat stands for transformer_engine"):
        octavo.compat.install("apex")
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("transformer-engine")
