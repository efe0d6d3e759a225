"""`import octavo` needs torch alone, costs little, and wakes nothing: each case in an interpreter of its own."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src"

STUDY_PACKAGES = ("typer", "rich", "plotly", "tokenizers", "safetensors", "transformers", "datasets")

# Makes packages look as if they were not installed. The error is ImportError, which covers both "not there" and
# "there, but it does not load": code that guards against the first alone fails here.
WITHOUT = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {packages!r}:
            raise ModuleNotFoundError(f"{{name}} is blocked by this test", name=name)

sys.meta_path.insert(0, Blocked())
"""

# A step of real work, so that "it imports" means that it can be used.
USE = """
import torch, octavo
x = torch.randn(16, 32)
q = octavo.quantize(x, octavo.E4M3, granularity="tensor")
assert (q.dequantize() - x).norm() / x.norm() < 0.04, "E4M3 keeps normal data within 4 %"
"""


def python(code: str, *blocked: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter that cannot import the packages in `blocked`; warnings are errors there too."""
    script = (WITHOUT.format(packages=set(blocked)) if blocked else "") + code
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env={**os.environ, "PYTHONPATH": str(SOURCE), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert not check or result.returncode == 0, result.stderr
    return result


def measured(code: str) -> Any:
    return json.loads(python(code).stdout.splitlines()[-1])


def test_the_block_blocks() -> None:
    result = python("import rich.table", "rich", check=False)
    assert "ModuleNotFoundError: rich is blocked by this test" in result.stderr


@pytest.mark.parametrize(
    "blocked",
    [("triton",), STUDY_PACKAGES, ("triton", *STUDY_PACKAGES)],
    ids=["triton", "study-packages", "both"],
)
def test_octavo_works_without(blocked: tuple[str, ...]) -> None:
    python(USE, *blocked)


def test_octavo_works_without_a_cuda_driver() -> None:
    python(USE + "assert not torch.cuda.is_available()", CUDA_VISIBLE_DEVICES="-1")


def test_the_command_line_names_the_missing_extra() -> None:
    result = python("from octavo.cli import main; main()", *STUDY_PACKAGES, check=False)
    assert result.returncode not in (0, None)
    assert "octavo[study]" in result.stderr
    assert "Traceback" not in result.stderr


def test_import_wakes_nothing() -> None:
    """What torch's own import brings is torch's; octavo adds none of these to it, and no device is touched."""
    sleepers = ("triton", "torch._dynamo", "torch._inductor", *STUDY_PACKAGES)
    code = f"""
import json, sys, torch
before = set(sys.modules)
import octavo
woken = sorted(name for name in {sleepers!r} if name in sys.modules and name not in before)
print(json.dumps([woken, torch.cuda.is_initialized()]))
"""
    assert measured(code) == [[], False]


def test_import_takes_less_than_a_second_beyond_torch() -> None:
    code = """
import json, time, torch
start = time.perf_counter()
import octavo
print(json.dumps(time.perf_counter() - start))
"""
    seconds = [measured(code) for _ in range(3)]
    assert statistics.median(seconds) < 1.0, f"import octavo took {seconds} s after import torch"


def test_the_version_is_stated_once() -> None:
    import octavo
    from octavo.version import __version__

    assert octavo.__version__ == __version__
