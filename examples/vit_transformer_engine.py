"""A vision transformer whose every Linear a user's own helper replaced by te.Linear, trained inside te.fp8_autocast.

    python examples/vit_transformer_engine.py                                     # small, runs on a CPU
    python examples/vit_transformer_engine.py --preset huge --compile blocks --steps 20  # 632 M parameters, wants a GPU

The helper is the one that circulates: its third positional argument is meant as `bias`, and in Transformer Engine it is
`sequence_parallel`, which changes nothing in one process. So layers come out with a bias, as with TE itself.
Needs timm, or transformers. Prints the losses in FP8 and in BF16 (the same layers, FP8 off), time and peak memory.
"""

from __future__ import annotations

import argparse

import torch
import vit_model
import vit_training
from octavo.compat.transformer_engine.common.recipe import DelayedScaling, Format
from torch import nn

import octavo.compat.transformer_engine.pytorch as te

fp8_recipe = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=16, amax_compute_algo="max")


def swap_linears(module: nn.Module) -> None:
    """Replace every nn.Linear below `module` by a te.Linear of its shape; weights are drawn anew."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear) and not isinstance(child, te.Linear):
            old = child
            setattr(module, name, te.Linear(old.in_features, old.out_features, old.bias is not None))
        else:
            swap_linears(child)


def run(precision: str, args: argparse.Namespace) -> vit_training.Run:
    torch.manual_seed(args.seed)
    model = vit_model.build_vit(args.preset, args.class_token)
    swap_linears(model)
    model.to(vit_training.device())

    def context() -> object:
        return te.fp8_autocast(enabled=precision == "fp8", fp8_recipe=fp8_recipe)

    return vit_training.train("vit_transformer_engine", precision, args, model, context=context)


if __name__ == "__main__":
    arguments = vit_training.parse(__doc__.splitlines()[0])
    vit_training.compare([run(precision, arguments) for precision in vit_training.precisions(arguments)])
