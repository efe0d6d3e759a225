"""Launches of Octavo's Triton kernels that repeat one another, made one in the compiler's graph.

Layers on one input (query, key, value; gate, up) each trace a cast of it. What the compiler knows of a graph it drops
when it comes twice; a Triton kernel it does not compare: each launch has a wrapper of its own around the kernel, and
memory of its own to write to. Here two launches are the same if the kernel, its options and constants are, what it
reads has the same value, and all that it writes is new memory. Values are numbered in one walk: a node whose function
and arguments have the same numbers has the same value.

A kernel may also gather by max into memory that held something before: the amax of delayed scaling. A launch that
gathers what an earlier one has gathered there already changes nothing, so it goes as well, and what it was to have left
there is what it found. Launches that gather in two places stay two.

The graph is that of forward and backward together, so what a backward keeps is kept once too; without gradients it is
that of the forward. Kept apart are launches of different checkpoints, what the graph hands out, and what lies on two
sides of a node that writes in place.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

import torch
import torch._inductor.fx_passes.joint_graph as joint_graph
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional
from torch.fx import Graph, Node
from torch.multiprocessing.reductions import StorageWeakRef

from octavo.kernels.known_writes import unwrapped

_aten = torch.ops.aten
_NEW = (
    _aten.empty.memory_format,
    _aten.new_empty.default,
    _aten.empty_strided.default,
    _aten.new_empty_strided.default,
)
# Of these it is known that they are random only if they say so; somebody else's operator may do anything.
_KNOWN = ("aten", "prims", "octavo")
_VALUES = (int, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
# By kernel, the argument into which it gathers by max.
_GATHERS: dict[Any, str | None] = {}


def share_repeats(kernel: Any, gathers: str | None = None) -> None:
    """Have Inductor launch `kernel` once for launches that repeat one another.

    Args:
        kernel: made by `triton.jit`; what it writes follows from its arguments, and it writes all that is read later.
        gathers: the argument to which it adds by max what follows from the others, if it has one.
    """
    _GATHERS[kernel] = gathers
    # Private: where torch has no such list of passes, launches stay as they are.
    passes = getattr(joint_graph, "pass_patterns", None)
    if passes is not None and _PASS not in passes:
        passes.append(_PASS)


class _Pass:
    """As Inductor calls its passes over the graph of forward and backward."""

    def apply(self, graph: Graph) -> int:
        """How many launches and operators went."""
        return merge_repeats(graph)


_PASS: Any = _Pass()


class _Launch(NamedTuple):
    """A launch that may repeat another one.

    Attributes:
        key: tells it from others, also by the place where it gathers.
        gathers: the argument into which it gathers, None if it does not.
        found: what lies there before.
    """

    key: Hashable
    gathers: str | None
    found: Any


def merge_repeats(graph: Graph) -> int:
    """Drop the launches of kernels, and Octavo's operators, that repeat earlier ones -> how many."""
    if not any(_is_ours(node) for node in graph.nodes):
        return 0
    numbers = _Numbers()
    handed_out = _storages(graph.output_node().all_input_nodes)
    known: dict[Hashable, Node] = {}
    merged = 0
    for node in list(graph.nodes):
        if node._erased:
            continue
        if _writes_in_place(node):
            known.clear()
            numbers.forget()
        launch = _launch(node, numbers)
        key = numbers.key(node) if launch is None else launch.key
        if key is not None and _is_ours(node) and handed_out.isdisjoint(_storages(_made(node, launch))):
            place = (key, node.meta.get("recompute"), node.meta.get("ac_graph_id"))
            earlier = known.setdefault(place, node)
            if earlier is not node and _has_gathered(earlier, launch):
                _replace(node, earlier, launch)
                merged += 1
                continue
        # What is left where a launch gathers depends on more than the key tells.
        numbers.give(node, None if launch is not None and launch.gathers else key)
    return merged


def _is_ours(node: Node) -> bool:
    if node.target is triton_kernel_wrapper_functional:
        return _kernel(node)[0] in _GATHERS
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "octavo"


def _writes_in_place(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


class _Numbers:
    """Numbers of values: nodes of one number have the same value."""

    def __init__(self) -> None:
        self._of_node: dict[Node, int] = {}
        self._of_key: dict[Hashable, int] = {}

    def of(self, argument: Any) -> Hashable:
        """What stands for an argument: the numbers of its nodes, and its constants."""
        if isinstance(argument, Node):
            return "number", self._of_node[argument]
        if isinstance(argument, (tuple, list)):
            return "list", *(self.of(one) for one in argument)
        if isinstance(argument, dict):
            return "dict", *((name, self.of(one)) for name, one in argument.items())
        return _constant(argument)

    def key(self, node: Node) -> Hashable | None:
        """What decides on the value of a node; None if that is not known."""
        target = node.target
        if isinstance(target, torch._ops.OpOverload):
            decided = not target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in target.tags
            decided = decided and target.namespace in _KNOWN and target not in _NEW
        else:
            decided = node.op == "call_function" and target is operator.getitem
        return (target, self.of(node.args), self.of(node.kwargs)) if decided else None

    def give(self, node: Node, key: Hashable | None) -> None:
        """Number a node: as the others of its key, or anew."""
        new = len(self._of_node)
        self._of_node[node] = new if key is None else self._of_key.setdefault(key, new)

    def forget(self) -> None:
        """From here on a key means another value."""
        self._of_key.clear()


def _constant(leaf: Any) -> Hashable:
    # True is not 1, and -0.0 not 0.0. To hash a size that is not known yet would be to ask for it.
    if leaf is None or isinstance(leaf, _VALUES):
        return type(leaf), leaf
    return type(leaf), repr(leaf) if isinstance(leaf, float) else id(leaf)


def _kernel(node: Node) -> tuple[Any, tuple[str, ...]]:
    """The kernel that a node launches, and its options, such as the number of warps."""
    kernel, configs = unwrapped(kernel_side_table.get_kernel(node.kwargs["kernel_idx"]))  # type: ignore[arg-type]
    return kernel, tuple(str(config) for config in configs)


def _arguments(node: Node) -> dict[str, Any]:
    """Those of the kernel that a node launches, by name."""
    arguments: Any = node.kwargs["kwargs"]
    return dict(arguments)


def _launch(node: Node, numbers: _Numbers) -> _Launch | None:
    """Of a node that launches one of the known kernels, which writes to new memory but for what it gathers."""
    if node.target is not triton_kernel_wrapper_functional or not _is_ours(node):
        return None
    kernel, options = _kernel(node)
    arguments, written = _arguments(node), tuple(node.kwargs["tensors_to_clone"])  # type: ignore[arg-type]
    # (Where nothing is gathered, something new stands in its place.)
    gathers = next((name for name in written if name == _GATHERS[kernel] and not _is_new(arguments[name])), None)
    if any(name != gathers and not _is_new(arguments[name]) for name in written):
        return None
    parts: list[Hashable] = [kernel, options, written]
    parts += [numbers.of(node.kwargs[name]) for name in ("grid", "tma_descriptor_metadata")]
    constants = kernel_side_table.get_constant_args(node.kwargs["constant_args_idx"])  # type: ignore[arg-type]
    parts += [(name, type(value), str(value)) for name, value in constants.items()]
    names: dict[Node, str] = {}
    found = None
    for name, value in arguments.items():
        if name == gathers:
            found = value
            parts.append((name, numbers.of(_gathered_there(value, name)[1])))
        elif _is_new(value):
            # Of two arguments that are one it is told that they are.
            parts.append((name, names.setdefault(value, name), _layout(value)))
        else:
            parts.append((name, numbers.of(value)))
    return _Launch(tuple(parts), gathers, found)


def _is_new(value: Any) -> bool:
    return isinstance(value, Node) and value.target in _NEW


def _layout(new: Node) -> Hashable:
    made = new.meta["val"]
    return str(tuple(made.shape)), str(made.stride()), made.dtype, made.device


def _gathered_there(found: Any, name: str) -> tuple[list[Node], Any]:
    """(the launches that left `found` where they gather, what was there before them)."""
    launches = []
    while isinstance(found, Node) and found.target is operator.getitem and found.args[1] == name:
        launch: Any = found.args[0]
        if launch.target is not triton_kernel_wrapper_functional or _GATHERS.get(_kernel(launch)[0]) != name:
            break
        launches.append(launch)
        found = _arguments(launch)[name]
    return launches, found


def _has_gathered(earlier: Node, launch: _Launch | None) -> bool:
    """True if what a launch would gather, `earlier` has gathered there before it."""
    return launch is None or launch.gathers is None or earlier in _gathered_there(launch.found, launch.gathers)[0]


def _is_gathered(user: Node, launch: _Launch | None) -> bool:
    """True of what is taken from where a launch gathers."""
    return launch is not None and user.target is operator.getitem and user.args[1] == launch.gathers


def _made(node: Node, launch: _Launch | None) -> list[Node]:
    """A node and what is taken from it, but for what it gathers."""
    return [node, *(u for u in node.users if u.target is operator.getitem and not _is_gathered(u, launch))]


def _replace(node: Node, earlier: Node, launch: _Launch | None) -> None:
    """Have those who use `node` take what `earlier` made, and what it gathers from where it would have."""
    for user in list(node.users):
        if launch is not None and _is_gathered(user, launch):
            user.replace_all_uses_with(launch.found)
            node.graph.erase_node(user)
    node.replace_all_uses_with(earlier)
    node.graph.erase_node(node)


def _storages(nodes: Iterable[Node]) -> set[StorageWeakRef]:
    """The memory of the tensors among the values of nodes."""
    values = (node.meta.get("val") for node in nodes)
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    return {StorageWeakRef(tensor.untyped_storage()) for tensor in tensors}
