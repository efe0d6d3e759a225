"""Training in FP8 on a CUDA device: curves, reproducibility, no waiting, no growth, the compiler, CUDA graphs.

    python benchmarks/check_training.py --out build/check_training.jsonl

One JSON line a check (hardware, versions, commit). Exit status 1 if a check failed, 2 without a CUDA device.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
# cuBLAS reads it once; without it, the same product may sum in another order.
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
# ruff: noqa: E402, T201

import torch
from benchmarks.check_kernels import Checks, environment
from benchmarks.training_compile import check_compile_time, check_compiled
from benchmarks.training_curves import check_curves, check_graphed
from benchmarks.training_steps import check_memory, check_synchronisation

PARTS: dict[str, Callable[[Any], None]] = {
    "synchronisation": check_synchronisation,
    "compiled": check_compiled,
    "curves": check_curves,
    "graphed": check_graphed,
    "memory": check_memory,
    "compile_time": check_compile_time,
}


def main() -> int:
    """Run the parts asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/check_training.jsonl"))
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="which parts (default: all)")
    parser.add_argument("--seconds", type=float, default=400, help="start no check after this long (default 400)")
    parser.add_argument("--commit", help="for the record, where git does not know it")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to check", file=sys.stderr)
        return 2
    checks = Checks(environment(options.commit), options.seconds, options.out)
    for name, part in PARTS.items():
        if name in options.only:
            part(checks)
    print(f"{len(checks.records)} checks, {checks.failed} failed; {options.out}")
    return 1 if checks.failed else 0


if __name__ == "__main__":
    sys.exit(main())
