from __future__ import annotations

import json

import torch
from typer.testing import CliRunner

from octavo.cli.app import app
from octavo.version import __version__

run = CliRunner()


def test_doctor_says_what_is_native_and_what_is_emulated() -> None:
    result = run.invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0
    findings = json.loads(result.stdout)
    assert (findings["octavo"], findings["torch"]) == (__version__, torch.__version__)
    native = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
    assert findings["fp8_products"] == ("native" if native else "emulated")


def test_doctor_for_people_and_the_version() -> None:
    assert "fp8 products" in run.invoke(app, ["doctor"]).stdout
    assert run.invoke(app, ["--version"]).stdout == f"octavo {__version__}\n"
