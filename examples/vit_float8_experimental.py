"""A vision transformer trained with float8_experimental's names: swap, forward, backward, sync, step.

    python examples/vit_float8_experimental.py                                   # small, runs on a CPU
    python examples/vit_float8_experimental.py --preset huge --compile --steps 20  # 632 M parameters, wants a GPU
    python examples/vit_float8_experimental.py --class-token --compile blocks

Needs timm, or transformers. Prints the losses in FP8 and in BF16, the time of a step and the peak memory.
"""

from __future__ import annotations

import argparse

import torch
import vit_model
import vit_training

from octavo.compat.float8_experimental import config
from octavo.compat.float8_experimental.float8_linear import Float8Linear
from octavo.compat.float8_experimental.float8_linear_utils import (
    swap_linear_with_float8_linear,
    sync_float8_amax_and_scale_history,
)

config.enable_amax_init = False  # scales begin at 1 and follow from the first sync on
config.enable_pre_and_post_forward = False


def run(precision: str, args: argparse.Namespace) -> vit_training.Run:
    torch.manual_seed(args.seed)
    model = vit_model.build_vit(args.preset, args.class_token).to(vit_training.device())
    if precision == "bf16":
        return vit_training.train("vit_float8_experimental", precision, args, model)
    swap_linear_with_float8_linear(model, Float8Linear)
    return vit_training.train(
        "vit_float8_experimental", precision, args, model, after_backward=sync_float8_amax_and_scale_history
    )


if __name__ == "__main__":
    arguments = vit_training.parse(__doc__.splitlines()[0])
    vit_training.compare([run(precision, arguments) for precision in vit_training.precisions(arguments)])
