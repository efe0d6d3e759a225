"""Rebuild a report from a record: ``python -m octavo.report RECORD.jsonl OUT.html``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from octavo.report.page import build
from octavo.report.record import read_jsonl


def main(arguments: list[str] | None = None) -> int:
    """Read RECORD.jsonl, write OUT.html; 0 when it was written, 1 with a message on stderr when not."""
    parser = argparse.ArgumentParser(
        prog="python -m octavo.report",
        description="Rebuild the HTML report of a study from its record.",
        epilog="example: python -m octavo.report study/record.jsonl study/report.html",
    )
    parser.add_argument(
        "record", type=Path, metavar="RECORD.jsonl", help="the rows that `octavo study --out DIR` wrote"
    )
    parser.add_argument("out", type=Path, metavar="OUT.html", help="the page to write; an existing one is replaced")
    chosen = parser.parse_args(arguments)
    try:
        rows, broken = read_jsonl(chosen.record)
        build(list(rows), chosen.out)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        sys.stderr.write(f"no report was written: {error}\n")
        return 1
    if broken:
        sys.stderr.write(f"{broken} lines of {chosen.record} are no JSON objects and were left out\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
