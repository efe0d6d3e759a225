"""`fuse` and `unfuse`: known structures of a converted model computed as one, and the way back.

Nothing but the class of the module that holds a structure changes, in place. Back goes only a class that is still the
one given here: what somebody has put on top of it since (FSDP2, a parametrisation, a wrapped forward) stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from octavo.conversion.casting_norm import FOLLOWERS, CastingNorm, casting_class
from octavo.conversion.causal_loss import unfuse_losses
from octavo.conversion.converted import runs_plainly
from octavo.conversion.followers import follow_nothing, followed_by, part_from
from octavo.conversion.joined_mlp import JoinedMLP, is_listened_to, joined_class
from octavo.conversion.known_parts import activation_name, is_replaced, known_norm
from octavo.conversion.report import StructureReport
from octavo.conversion.structures import (
    MLPS,
    NORMS,
    MLPStructure,
    NormStructure,
    Path,
    class_reason,
    code_reason,
    is_known,
    is_octavos,
    part,
)
from octavo.modules import FixedProduct, FP8LinearMixin


class _Found(NamedTuple):
    """A module that has the parts of a structure, and what speaks against it by its class."""

    name: str
    module: nn.Module
    structure: MLPStructure | NormStructure
    reason: str


def fuse(model: nn.Module, converted: set[int], wanted: bool = True, dry_run: bool = False) -> list[StructureReport]:
    """Have the known structures of a model run as one.

    Args:
        model: converted.
        converted: ids of the linear layers that are in FP8, or would be; frozen ones are anyway.
        wanted: False turns structures back into what they were, and says so.
        dry_run: change nothing.
    """
    every = list(_found(model))
    rows = []
    for found in every:
        reason = found.reason or ("" if wanted else "fuse=False")
        rows.append(_report(found, reason or _layer_reason(found, converted)))
    if dry_run:
        return rows
    # A normalisation that stands in several places is changed for those that want it.
    fused: dict[int, list[_Found]] = {}
    for found, row in zip(every, rows, strict=True):
        if row.fused:
            fused.setdefault(id(_changed_module(found)), []).append(found)
    for group in fused.values():
        _change(group)
    for i, found in enumerate(every):
        module = _changed_module(found)
        left = "" if id(module) in fused else _restore(module)
        if left:
            rows[i] = replace(rows[i], reason=f"{rows[i].reason}; {left}")
    return rows


def unfuse(model: nn.Module) -> list[str]:
    """Turn every structure that `fuse` changed back into its class, in place -> remarks on those that keep another."""
    remarks = []
    for name, module in model.named_modules():
        left = _restore(module)
        if left:
            remarks.append(f"{name or '(root)'}: {left}")
        follow_nothing(module)
    unfuse_losses(model)
    return remarks


def _found(model: nn.Module) -> Iterator[_Found]:
    """The structures of a model by the names of their parts, each with the reason that speaks against it."""
    for name, module in model.named_modules():
        kind = _class_before(module)
        if is_octavos(kind):
            continue
        alike = [mlp for mlp in MLPS if all(isinstance(part(module, path), nn.Module) for path in mlp.layers)]
        if alike:
            mlp = next((one for one in alike if is_known(one, kind)), alike[0])
            reason = class_reason(mlp, kind) or code_reason(mlp, module, kind) or _replaced_reason(module)
            yield _Found(name, module, mlp, reason)
        for norm in NORMS:
            there = isinstance(part(module, norm.norm), nn.Module)
            if there and (_followers(module, norm) or is_known(norm, kind)):
                yield _Found(name, module, norm, class_reason(norm, kind) or norm.reason)


def _class_before(module: nn.Module) -> type[nn.Module]:
    return module.fused_from if isinstance(module, (JoinedMLP, CastingNorm)) else type(module)


def _replaced_reason(module: nn.Module) -> str:
    return "its forward was replaced on the instance" if is_replaced(module) else ""


def _followers(module: nn.Module, norm: NormStructure) -> list[tuple[Path, Any]]:
    """The linear layers that take the output of a normalisation, of those that are there."""
    layers = ((path, part(module, path)) for path in norm.followers)
    return [(path, layer) for path, layer in layers if isinstance(layer, nn.Module)]


def _layer_reason(found: _Found, converted: set[int]) -> str:
    """Why the parts of a structure that is known cannot run as one."""
    module, structure = found.module, found.structure
    if isinstance(structure, NormStructure):
        return _norm_reason(module, structure, converted)
    for path in structure.parts:
        if is_listened_to(part(module, path)):
            return f"a hook listens to {'.'.join(path)}, or its forward was replaced"
    for path in structure.layers:
        if not _is_in_fp8(part(module, path), converted):
            return f"{'.'.join(path)} {_what_it_does(part(module, path))}"
    if len({isinstance(part(module, path), FixedProduct) for path in structure.layers}) > 1:
        return "some layers are frozen, and others are not"
    if activation_name(part(module, structure.activation)) is None:
        return f"the activation {type(part(module, structure.activation)).__name__} is not known"
    for path in structure.between:
        between = part(module, path)
        if type(between) is nn.Dropout and between.p > 0:
            return f"a dropout of {between.p} lies between {'.'.join(structure.activation)} and the next layer"
        if type(between) not in (nn.Dropout, nn.Identity):
            return f"a {type(between).__name__} lies between {'.'.join(structure.activation)} and the next layer"
    return ""


def _is_in_fp8(layer: Any, converted: set[int]) -> bool:
    return id(layer) in converted or (isinstance(layer, FixedProduct) and runs_plainly(layer))


def _what_it_does(layer: Any) -> str:
    """Of a layer that is not in FP8, or whose product nobody else can compute."""
    return "computes its product by itself" if isinstance(layer, FixedProduct) else "stays in high precision"


def _norm_reason(module: nn.Module, structure: NormStructure, converted: set[int]) -> str:
    norm = part(module, structure.norm)
    if known_norm(norm, _class_before(norm)) is None:
        return f"the normalisation {_class_before(norm).__name__} is not known"
    if not any(_is_in_fp8(layer, converted) for _, layer in _followers(module, structure)):
        followers = _followers(module, structure)
        does = _what_it_does(followers[0][1] if followers else None)
        return f"what follows ({', '.join(path[-1] for path in structure.followers)}) {does}"
    return ""


def _report(found: _Found, reason: str) -> StructureReport:
    structure, prefix = found.structure, f"{found.name}." if found.name else ""
    if isinstance(structure, MLPStructure):
        kind = _class_before(found.module)
        return StructureReport(found.name, kind.__name__, _parts(found, kind), not reason, reason)
    norm = part(found.module, structure.norm)
    parts = tuple(path[-1] for path, _ in _followers(found.module, structure))
    name = f"{prefix}{'.'.join(structure.norm)}"
    return StructureReport(name, _class_before(norm).__name__, parts, not reason, reason)


def _parts(found: _Found, kind: type[nn.Module]) -> tuple[str, ...]:
    """Names of what an MLP computes as one, of those that are there; none of a class that is not known."""
    structure = found.structure
    assert isinstance(structure, MLPStructure), "of an MLP"
    if not is_known(structure, kind):
        return ()
    paths = (*structure.first, structure.activation, structure.last)
    return tuple(
        path[-1] if path == structure.activation else ".".join(path)
        for path in paths
        if part(found.module, path) is not None
    )


def _changed_module(found: _Found) -> nn.Module:
    """The module whose class the structure changes."""
    if isinstance(found.structure, MLPStructure):
        return found.module
    norm: nn.Module = part(found.module, found.structure.norm)
    return norm


def _change(group: list[_Found]) -> None:
    """Change the module of one structure, or of several that have the same normalisation."""
    module, structure = _changed_module(group[0]), group[0].structure
    kind = _class_before(module)
    if isinstance(structure, MLPStructure):
        module.__dict__.pop("one_by_one", None)
        if not isinstance(module, JoinedMLP):
            module.__class__ = joined_class(kind, structure)
        return
    _forget_followers(module)
    found = [layer for one in group for _, layer in _followers(one.module, one.structure)]  # type: ignore[arg-type]
    followers = [layer for layer in found if runs_plainly(layer)]
    for layer in followers:
        # That others make the same codes of an input with delayed scaling is known by its state.
        if isinstance(layer, FP8LinearMixin):
            layer.delayed_state.input.shared = True
    if not isinstance(module, CastingNorm):
        module.__class__ = casting_class(kind)
    module.__dict__[FOLLOWERS] = followed_by(followers)


def _restore(module: nn.Module) -> str:
    """Give a module its class back -> why it keeps the one that it has, if it does."""
    if not isinstance(module, (JoinedMLP, CastingNorm)):
        return ""
    _forget_followers(module)
    if "fused_from" in type(module).__dict__ and not is_replaced(module):
        module.__dict__.pop("one_by_one", None)
        module.__class__ = module.fused_from  # type: ignore[assignment]
        return ""
    if isinstance(module, JoinedMLP):
        module.__dict__["one_by_one"] = True
    if is_replaced(module):
        return "its forward was replaced after it was fused, perhaps by one that calls that: its class stays, unfused"
    return f"{type(module).__name__} was put on top of it after it was fused, and stays, unfused"


def _forget_followers(module: nn.Module) -> None:
    followers = module.__dict__.pop(FOLLOWERS, None)
    if followers is not None:
        part_from(followers)
