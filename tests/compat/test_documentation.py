"""docs/compat.md: its code runs from top to bottom, in an interpreter of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_pages_code_runs() -> None:
    page = (ROOT / "docs" / "compat.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 3
    checks = "assert out.shape == (1024, 768) and layer.weight.grad is not None\nassert model[0].fp8_scale_x != 1\n"
    result = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks) + checks],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 0, result.stderr
