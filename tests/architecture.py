"""The rules of the house, each a function from a source file to what it breaks. test_architecture.py runs them.

A rule sees one `Source` and yields sentences; it looks at the syntax tree, so that imports inside functions and under
TYPE_CHECKING count and words in docstrings do not.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path, PurePosixPath

# Rooms in walking order; those in one group never import one another.
WALK: list[set[str]] = [
    {"formats"},
    {"scaling"},
    {"kernels"},
    {"tensor"},
    {"recipes"},
    {"runtime"},
    {"functional"},
    {"modules"},
    {"conversion"},
    {"distributed", "optim", "inference", "inspection"},
    {"compat"},
    {"report"},
    {"bench", "study"},
    {"cli"},
]
POSITION = {room: position for position, group in enumerate(WALK) for room in group}
# Files beside the rooms: what users import, what `python -m octavo` runs, and what any room may import.
FRONT_DOOR, COMMAND, LEAF = "__init__", "__main__", "version"

MAY_USE_TRITON = {"kernels"}
MAY_USE_DISTRIBUTED = {"distributed", "bench", "study"}
MAY_READ_ENVIRONMENT = {"cli"}
# Sets one variable for the processes in which Inductor compiles; it reads none.
SETS_ENVIRONMENT = "kernels/compiled.py"
EMPTY_NAMES = {"utils", "util", "common", "helper", "helpers", "misc"}
FORMAT_LIMITS = {448, 57344}
FILE_LINES, FUNCTION_LINES, KERNEL_LINES = 400, 60, 120


@dataclass(frozen=True)
class Source:
    """A Python file of the package: its path below src/octavo, as in "kernels/cast/reference.py", and its text."""

    path: str
    text: str

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(ast.parse(self.text, self.path)))

    @property
    def room(self) -> str:
        """The first folder below src/octavo, or the file's stem where it lies beside the rooms."""
        return PurePosixPath(self.path).with_suffix("").parts[0]

    @cached_property
    def imports(self) -> list[tuple[int, str]]:
        """(line, module) of every absolute import, by statement or by `import_module("…")`.

        `from a.b import c` gives "a.b.c": whether c is a module is not known here, and what forbids a.b forbids it too.
        """
        found = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found += [(node.lineno, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
            elif isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] in {"import_module", "__import__"}:
                named = [argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant)]
                found += [(node.lineno, str(name)) for name in named]
        return found


def dotted(node: ast.AST) -> str:
    """ "a.b.c" of an attribute chain on a name, "" of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def room_order(source: Source) -> Iterator[str]:
    """A room imports only from rooms to its left; nobody inside goes out through the front door."""
    if source.room in (FRONT_DOOR, LEAF, COMMAND):
        return
    if source.room not in POSITION:
        yield f"{source.path}: '{source.room}' is no room; rooms are {', '.join(POSITION)}"
        return
    for line, module in source.imports:
        if not is_within(module, "octavo"):
            continue
        target = [*module.split("."), FRONT_DOOR][1]
        if target == LEAF or target == source.room:
            continue
        if target not in POSITION:
            yield f"{source.path}:{line}: {module} goes through the front door; import from the room that defines it"
        elif POSITION[target] == POSITION[source.room]:
            yield f"{source.path}:{line}: {source.room} and {target} never import one another ({module})"
        elif POSITION[target] > POSITION[source.room]:
            yield f"{source.path}:{line}: {source.room} is left of {target} and may not import it ({module})"


def command_imports_cli(source: Source) -> Iterator[str]:
    """`python -m octavo` is the command line, and nothing of its own."""
    if source.path == f"{COMMAND}.py":
        for line, module in source.imports:
            if not is_within(module, "octavo.cli") and not is_within(module, "__future__"):
                yield f"{source.path}:{line}: imports from octavo.cli alone ({module})"


def leaf_imports_nothing(source: Source) -> Iterator[str]:
    """version.py is read by every room, and by the build as text."""
    if source.path == f"{LEAF}.py":
        for line, module in source.imports:
            yield f"{source.path}:{line}: a leaf imports nothing ({module})"


def absolute_imports(source: Source) -> Iterator[str]:
    for node in source.nodes:
        if isinstance(node, ast.ImportFrom) and node.level:
            yield f"{source.path}:{node.lineno}: relative import of {'.' * node.level}{node.module or ''}"


def triton_in_kernels(source: Source) -> Iterator[str]:
    if source.room in MAY_USE_TRITON:
        return
    for line, module in source.imports:
        if is_within(module, "triton"):
            yield f"{source.path}:{line}: only kernels imports triton"


def collectives_in_distributed(source: Source) -> Iterator[str]:
    """`import torch.distributed`, `from torch import distributed`, and `torch.distributed.x` through `import torch`."""
    if source.room in MAY_USE_DISTRIBUTED:
        return
    lines = {line for line, module in source.imports if is_within(module, "torch.distributed")}
    lines |= {
        node.lineno
        for node in source.nodes
        if isinstance(node, ast.Attribute) and is_within(dotted(node), "torch.distributed")
    }
    for line in sorted(lines):
        yield f"{source.path}:{line}: only {', '.join(sorted(MAY_USE_DISTRIBUTED))} use torch.distributed"


def environment_in_cli(source: Source) -> Iterator[str]:
    if source.room in MAY_READ_ENVIRONMENT or source.path == SETS_ENVIRONMENT:
        return
    readers = ("os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv")
    lines = {line for line, module in source.imports if module in readers}
    lines |= {node.lineno for node in source.nodes if isinstance(node, ast.Attribute) and dotted(node) in readers}
    for line in sorted(lines):
        yield f"{source.path}:{line}: only cli reads the environment"


def telling_names(source: Source) -> Iterator[str]:
    for part in PurePosixPath(source.path).with_suffix("").parts:
        if part in EMPTY_NAMES:
            yield f"{source.path}: '{part}' does not say what is in it"


def limits_in_formats(source: Source) -> Iterator[str]:
    if source.room == "formats":
        return
    for node in source.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and node.value in FORMAT_LIMITS:
            yield f"{source.path}:{node.lineno}: {node.value} is a format's limit; take it from octavo.formats"


def recipes_not_asked_their_name(source: Source) -> Iterator[str]:
    """No `isinstance(x, SomeScaling)` and no `case SomeRecipe():` outside recipes."""
    if source.room == "recipes":
        return
    for node in source.nodes:
        asked: list[ast.expr] = []
        if isinstance(node, ast.Call) and dotted(node.func) in ("isinstance", "issubclass"):
            asked = node.args[1:]
        elif isinstance(node, ast.MatchClass):
            asked = [node.cls]
        names = {dotted(part).split(".")[-1] for kind in asked for part in ast.walk(kind)}
        for name in sorted(names):
            if name.endswith(("Scaling", "Recipe")):
                yield f"{source.path}:{asked[0].lineno}: a recipe is asked what it wants, not whether it is {name}"


def small_files(source: Source) -> Iterator[str]:
    lines = len(source.text.splitlines())
    if lines > FILE_LINES:
        yield f"{source.path}: {lines} lines, more than {FILE_LINES}"


def short_functions(source: Source) -> Iterator[str]:
    limit = KERNEL_LINES if PurePosixPath(source.path).name.endswith("_kernel.py") else FUNCTION_LINES
    for node in source.nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > limit:
                yield f"{source.path}:{node.lineno}: {node.name} has {lines} lines, more than {limit}"


def front_door_reexports(source: Source) -> Iterator[str]:
    """octavo/__init__.py is a docstring, imports from its own rooms and __all__."""
    if source.path != f"{FRONT_DOOR}.py":
        return
    for position, node in enumerate(ast.parse(source.text).body):
        is_docstring = position == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_reexport = isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("octavo", "__future__")
        is_all = isinstance(node, ast.Assign) and [dotted(target) for target in node.targets] == ["__all__"]
        if not (is_docstring or is_reexport or is_all):
            yield f"{source.path}:{node.lineno}: the front door only re-exports what octavo's rooms define"


RULES = [
    room_order,
    command_imports_cli,
    leaf_imports_nothing,
    absolute_imports,
    triton_in_kernels,
    collectives_in_distributed,
    environment_in_cli,
    telling_names,
    limits_in_formats,
    recipes_not_asked_their_name,
    small_files,
    short_functions,
    front_door_reexports,
]

# An absolute path below a home, root or work folder, after anything but a letter, digit, dot or slash: those are the
# inside of an address.
MACHINE_PATH = re.compile(r"(?<![\w./-])/(?:work|root|farm|home/\w+|Users/\w+)(?:/|\b(?![-\w]))")


def machine_paths(name: str, text: str) -> Iterator[str]:
    """Paths of one machine, in any text file."""
    for number, line in enumerate(text.splitlines(), 1):
        found = MACHINE_PATH.search(line)
        if found:
            yield f"{name}:{number}: a path of one machine: {found.group()}"


@cache
def package_sources(package: Path) -> list[Source]:
    """Every file of the package; each is read and parsed once for all rules."""
    paths = sorted(package.rglob("*.py"))
    return [Source(path.relative_to(package).as_posix(), path.read_text(encoding="utf-8")) for path in paths]
