"""What the README shows does what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_ten_lines_print_an_error_table() -> None:
    code = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)[0]
    assert len(code.strip().splitlines()) <= 12
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    header, *rows = result.stdout.splitlines()
    assert header.split()[:3] == ["one", "scale", "per"]
    error_of_product = {row[:16].strip(): float(row.split()[-1].rstrip("%")) for row in rows}
    assert list(error_of_product) == ["tensor", "row", "(1, 128)", "mx"]
    # N(0, 1) data in E4M3, both operands: 3.6 % from the rounding alone, 5 % is the sane bound, and less than 2 % would
    # mean that nothing was quantized. One scale for a million to one of tokens flushes the small ones to zero.
    assert all(2.0 < error_of_product[granularity] < 5.0 for granularity in ("row", "(1, 128)", "mx"))
    assert error_of_product["tensor"] > 10.0


def test_the_commands_exist() -> None:
    usage = subprocess.run([ROOT / "dev", "help"], capture_output=True, text=True, check=True).stdout
    for command in re.findall(r"^\./dev (\w+)", README, flags=re.MULTILINE):
        assert re.search(rf"^  {command} ", usage, flags=re.MULTILINE), command


def test_the_links_lead_somewhere() -> None:
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8")):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
