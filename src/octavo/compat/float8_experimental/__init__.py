"""Names of float8_experimental (pytorch-labs, 2023-2024) over Octavo's delayed and current scaling.

    from octavo.compat.float8_experimental import config
    from octavo.compat.float8_experimental.float8_linear import Float8Linear
    from octavo.compat.float8_experimental.float8_linear_utils import (
        swap_linear_with_float8_linear, sync_float8_amax_and_scale_history)

    config.enable_amax_init = False
    config.enable_pre_and_post_forward = False
    swap_linear_with_float8_linear(model, Float8Linear)
    model = torch.compile(model)
    ...
    loss.backward()
    sync_float8_amax_and_scale_history(model)
    optimizer.step()

Where it differs from the original: the amax history is real (the original rolled a copy of it), the amaxes of several
forwards between two syncs merge by max (there the last one won), and evaluation changes nothing.
"""

from octavo.compat.float8_experimental import config

__all__ = ["config"]
