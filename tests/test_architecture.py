"""The house keeps its rules: every file of the package against every rule, and every rule against its own offenders."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.architecture import (
    FILE_LINES,
    FUNCTION_LINES,
    KERNEL_LINES,
    RULES,
    Source,
    absolute_imports,
    collectives_in_distributed,
    command_imports_cli,
    environment_in_cli,
    front_door_reexports,
    leaf_imports_nothing,
    limits_in_formats,
    machine_paths,
    package_sources,
    recipes_not_asked_their_name,
    room_order,
    short_functions,
    small_files,
    telling_names,
    triton_in_kernels,
)

Rule = Callable[[Source], Iterator[str]]

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "octavo"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps(rule: Rule) -> None:
    sources = package_sources(PACKAGE)
    assert sources
    broken = [sentence for source in sources for sentence in rule(source)]
    assert not broken, "\n" + "\n".join(broken)


def test_the_package_has_its_front_door_and_its_leaf() -> None:
    assert (PACKAGE / "__init__.py").is_file()
    assert (PACKAGE / "version.py").is_file()


def test_no_tracked_file_knows_one_machine() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: which files are tracked is unknown")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    broken: list[str] = []
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path.is_file() and b"\0" not in (content := path.read_bytes()):
            broken += machine_paths(name, content.decode("utf-8", errors="replace"))
    assert not broken, "\n" + "\n".join(broken)


def lines_of_function(count: int) -> str:
    return "def f():\n" + "    pass\n" * (count - 1)


OFFENDERS: list[tuple[Rule, str, str]] = [
    (room_order, "formats/cast.py", "from octavo.scaling import amax"),
    (room_order, "formats/cast.py", "import octavo.cli"),
    (room_order, "kernels/gemm/__init__.py", "def f():\n    from octavo.tensor.quantized import QuantizedTensor"),
    (
        room_order,
        "tensor/a.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from octavo.modules import Linear",
    ),
    (room_order, "optim/adam.py", "from octavo.inference import calibrate"),
    (room_order, "study/train.py", "import octavo.bench.timing"),
    (room_order, "modules/linear.py", "from octavo.compat import transformer_engine"),
    (room_order, "report/html.py", "from octavo import study"),
    (room_order, "runtime/a.py", "import importlib\nimportlib.import_module('octavo.modules.linear')"),
    (room_order, "runtime/a.py", "__import__('octavo.modules')"),
    (room_order, "study/train.py", "import octavo"),
    (room_order, "study/train.py", "from octavo import convert"),
    (room_order, "attic/boxes.py", "x = 1"),
    (room_order, "loose.py", "x = 1"),
    (room_order, "cli/a.py", "import octavo.__main__"),
    (command_imports_cli, "__main__.py", "from octavo.study import run_study"),
    (leaf_imports_nothing, "version.py", "import torch"),
    (absolute_imports, "formats/cast.py", "from . import format"),
    (absolute_imports, "formats/cast.py", "def f():\n    from ..scaling import amax"),
    (triton_in_kernels, "scaling/amax.py", "import triton"),
    (triton_in_kernels, "scaling/amax.py", "def f():\n    from triton import language as tl"),
    (triton_in_kernels, "bench/timing.py", "import importlib as i\ni.import_module('triton.testing')"),
    (collectives_in_distributed, "runtime/state.py", "import torch.distributed as dist"),
    (collectives_in_distributed, "runtime/state.py", "from torch import distributed"),
    (collectives_in_distributed, "runtime/state.py", "from torch.distributed import ReduceOp"),
    (collectives_in_distributed, "compat/te.py", "import torch\ntorch.distributed.is_initialized()"),
    (environment_in_cli, "kernels/a.py", "import os\nos.environ.get('OCTAVO_FAST')"),
    (environment_in_cli, "kernels/a.py", "import os\nif os.environ['A']: pass"),
    (environment_in_cli, "study/a.py", "from os import getenv"),
    (environment_in_cli, "study/a.py", "import os\nos.getenv('A')"),
    (telling_names, "kernels/utils.py", ""),
    (telling_names, "study/helpers/text.py", ""),
    (telling_names, "study/common/__init__.py", ""),
    (telling_names, "bench/misc.py", ""),
    (limits_in_formats, "scaling/rules.py", "m = 448 / amax"),
    (limits_in_formats, "scaling/rules.py", "x = x.clamp(-448.0, 448.0)"),
    (limits_in_formats, "compat/te.py", "def f(a, m=57344.0): return m / a"),
    (recipes_not_asked_their_name, "modules/a.py", "isinstance(r, DelayedScaling)"),
    (recipes_not_asked_their_name, "modules/a.py", "isinstance(r, (recipes.BlockScaling, int))"),
    (recipes_not_asked_their_name, "modules/a.py", "isinstance(r, A | CustomRecipe)"),
    (recipes_not_asked_their_name, "modules/a.py", "match r:\n    case CurrentScaling():\n        pass"),
    (small_files, "formats/cast.py", "x = 1\n" * (FILE_LINES + 1)),
    (short_functions, "formats/cast.py", lines_of_function(FUNCTION_LINES + 1)),
    (
        short_functions,
        "formats/cast.py",
        "class A:\n    async " + lines_of_function(61).replace("    pass", "        pass"),
    ),
    (short_functions, "kernels/cast/triton_kernel.py", lines_of_function(KERNEL_LINES + 1)),
    (short_functions, "kernels/cast/packed_kernel.py", lines_of_function(KERNEL_LINES + 1)),
    (short_functions, "kernels/cast/launch.py", lines_of_function(FUNCTION_LINES + 1)),
    (front_door_reexports, "__init__.py", "import torch"),
    (front_door_reexports, "__init__.py", "from torch import Tensor"),
    (front_door_reexports, "__init__.py", "def __getattr__(name): ..."),
    (front_door_reexports, "__init__.py", "if True:\n    from octavo.formats import cast"),
    (front_door_reexports, "__init__.py", "E4M3 = 3"),
]

LAWFUL: list[tuple[Rule, str, str]] = [
    (
        room_order,
        "scaling/rules.py",
        "import torch\nfrom octavo.formats import cast\nfrom octavo.scaling.amax import amax",
    ),
    (
        room_order,
        "cli/study.py",
        "from octavo.study import run\nfrom octavo.bench import cases\nfrom octavo import version",
    ),
    (room_order, "formats/cast.py", "from octavo.version import __version__\nimport octavos.thing"),
    (room_order, "formats/cast.py", "'from octavo.scaling import amax'"),
    (room_order, "__init__.py", "from octavo.cli import main"),
    (command_imports_cli, "__main__.py", "from octavo.cli import main\nmain()"),
    (leaf_imports_nothing, "version.py", "__version__ = '1'"),
    (absolute_imports, "formats/cast.py", "from octavo.formats import format"),
    (triton_in_kernels, "kernels/cast/triton_kernel.py", "import triton"),
    (triton_in_kernels, "study/a.py", "import tritonclient"),
    (collectives_in_distributed, "distributed/amax.py", "import torch.distributed\ntorch.distributed.all_reduce(x)"),
    (collectives_in_distributed, "bench/a.py", "from torch import distributed"),
    (collectives_in_distributed, "runtime/state.py", "'''Not torch.distributed.'''\nimport torch.distributions"),
    (environment_in_cli, "cli/main.py", "import os\nos.environ['A']"),
    (environment_in_cli, "kernels/compiled.py", "import os\nos.environ.setdefault('A', '1')"),
    (environment_in_cli, "study/a.py", "import os\nos.path.join(environ, 'a')"),
    (telling_names, "kernels/utility_of_rows.py", ""),
    (limits_in_formats, "formats/e4m3.py", "max = 448.0"),
    (limits_in_formats, "scaling/rules.py", "'''At most 448.'''\nx = 4480\ny = '448'\nz = True"),
    (recipes_not_asked_their_name, "recipes/a.py", "isinstance(r, DelayedScaling)"),
    (recipes_not_asked_their_name, "modules/a.py", "isinstance(r, Linear)\nr = DelayedScaling()"),
    (small_files, "formats/cast.py", "x = 1\n" * FILE_LINES),
    (short_functions, "formats/cast.py", lines_of_function(FUNCTION_LINES)),
    (short_functions, "kernels/cast/triton_kernel.py", lines_of_function(KERNEL_LINES)),
    (short_functions, "kernels/cast/packed_kernel.py", lines_of_function(KERNEL_LINES)),
    (front_door_reexports, "__init__.py", "'''Octavo.'''\nfrom octavo.formats import cast\n__all__ = ['cast']"),
]


def named(case: object) -> str | None:
    return case.__name__ if callable(case) else None


@pytest.mark.parametrize(("rule", "path", "text"), OFFENDERS, ids=named)
def test_an_offender_is_caught(rule: Rule, path: str, text: str) -> None:
    assert [sentence for sentence in rule(Source(path, text)) if sentence.startswith(path)]


@pytest.mark.parametrize(("rule", "path", "text"), LAWFUL, ids=named)
def test_the_lawful_pass(rule: Rule, path: str, text: str) -> None:
    assert list(rule(Source(path, text))) == []


def test_every_rule_has_an_offender_and_a_lawful_file() -> None:
    assert {rule for rule, _, _ in OFFENDERS} == set(RULES) == {rule for rule, _, _ in LAWFUL}


@pytest.mark.parametrize("folder", ["work", "root", "farm", "home/someone", "Users/someone"])
@pytest.mark.parametrize("line", ["see {}/a.txt", "path = '{}/main'", "({}/x)", "cd {}", "PATH={}/bin"])
def test_a_machine_path_is_caught(folder: str, line: str) -> None:
    [sentence] = machine_paths("README.md", "first\n" + line.format("/" + folder))
    assert sentence.startswith("README.md:2:")


@pytest.mark.parametrize(
    ("line", "folder"),
    [
        ("https://example.org/{}/a", "work"),
        ("a/{}/b", "root"),
        ("the work/{} split", "root"),
        ("/usr/bin/chromium", ""),
        ("/tmp/x", ""),
        ("/workers/a", ""),
        ("src/{}/", "work"),
    ],
)
def test_an_ordinary_path_passes(line: str, folder: str) -> None:
    assert list(machine_paths("README.md", line.format(folder))) == []
