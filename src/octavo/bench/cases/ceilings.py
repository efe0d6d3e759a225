"""Ceilings of the device: copying, and matrix products in bf16 and in each kind of FP8 that torch offers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octavo.bench.cuda_graphs import num_sets
from octavo.bench.operands import Cast, current_cast, rowwise_cast
from octavo.bench.roofline import matmul_flops
from octavo.bench.session import Session, reason_of
from octavo.bench.shapes import Shape
from octavo.bench.timing import Call, Measure, interleaved

Product = Callable[[Tensor, Tensor], Call]
_BLOCK = 128
# cuBLASLt reads the scales of 128 x 128 blocks in groups of this many along K.
_BLOCK_SCALES_PADDED_TO = 4


def measure_ceilings(session: Session) -> None:
    """Rows `ceiling`: the rate of copying, then of each kind of product at each shape."""
    measure_copy(session)
    for shape in session.shapes.matmuls:
        if not session.fits({"kind": "ceiling", "name": "bf16", "shape": list(shape)}):
            continue
        _measure_products(session, shape)
        session.release()


def measure_copy(session: Session) -> None:
    """The `ceiling` row of copying, unless there is one."""
    if session.ceilings.copy is not None:
        return
    num_bytes = session.shapes.copy_bytes
    about = {"kind": "ceiling", "name": "copy", "shape": [num_bytes], "method": session.timer.method}
    with session.recorded_if_failed(about):
        source = torch.empty(num_bytes, dtype=torch.uint8, device=session.device).random_()
        target = torch.empty_like(source)
        measures = {"copy": session.timer.prepare([lambda: target.copy_(source)])}
        timing = interleaved(measures, session.rounds, session.dropped)["copy"]
        moved = 2 * num_bytes  # read and written
        session.measured(about, timing.row() | {"bytes": moved, "per_s": moved / timing.median, "unit": "B/s"})


def _measure_products(session: Session, shape: Shape) -> None:
    m, k, n = shape
    sets = num_sets(k * (m + n), session.cache_bytes)  # of the FP8 codes, the smallest of all operands
    pairs = [(_normal(session, m, k), _normal(session, n, k)) for _ in range(sets)]
    makers: dict[str, Product] = {
        "bf16": lambda a, b: lambda: a @ b.t(),
        "fp8_tensor": tensor_product,
        "fp8_row": row_product,
        "fp8_block": block_product,
    }
    abouts, measures = {}, {}
    for name, make in makers.items():
        about = {"kind": "ceiling", "name": name, "shape": list(shape), "method": session.timer.method, "sets": sets}
        try:
            measures[name] = _prepared(session, [make(a, b) for a, b in pairs])
            abouts[name] = about
        except Exception as error:  # torch refuses a kind here: that is the finding
            session.skipped(about, reason_of(error))
    for name, timing in interleaved(measures, session.rounds, session.dropped).items():
        flops = matmul_flops(m, k, n)
        figures = timing.row() | {"flops": flops, "per_s": flops / timing.median, "unit": "FLOP/s"}
        session.measured(abouts[name], figures)


def _normal(session: Session, rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, device=session.device, dtype=torch.bfloat16)


def _prepared(session: Session, calls: list[Call]) -> Measure:
    calls[0]()  # what torch refuses it refuses here, outside of a capture
    return session.timer.prepare(calls)


def tensor_product(a: Tensor, b: Tensor, fast: bool = True) -> Call:
    """[m, k] @ [n, k]^T, one scale a tensor."""
    return _scaled(current_cast(), a, b, fast)


def row_product(a: Tensor, b: Tensor, fast: bool = True) -> Call:
    """[m, k] @ [n, k]^T, one scale a row of each."""
    return _scaled(rowwise_cast(), a, b, fast)


def _scaled(cast: Cast, a: Tensor, b: Tensor, fast: bool) -> Call:
    return scaled_mm_call(*cast(a).row_wise, *cast(b).row_wise, fast)


def scaled_mm_call(codes_a: Tensor, scale_a: Tensor, codes_b: Tensor, scale_b: Tensor, fast: bool) -> Call:
    """torch's own FP8 product of K-major codes [m, k] and [n, k], called directly."""
    by_row = scale_b.reshape(1, -1) if scale_b.dim() == 2 else scale_b
    return lambda: torch._scaled_mm(
        codes_a, codes_b.t(), scale_a=scale_a, scale_b=by_row, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


def block_product(a: Tensor, b: Tensor) -> Call:
    """[m, k] @ [n, k]^T, scales of 1 x 128 blocks of a and of 128 x 128 blocks of b.

    The scales are ones: the product takes as long whatever they are.
    """
    functional: Any = torch.nn.functional
    if not hasattr(functional, "scaled_mm"):
        raise NotImplementedError(f"torch {torch.__version__} has no torch.nn.functional.scaled_mm")
    (m, k), n = a.shape, b.shape[0]
    if k % _BLOCK or n % _BLOCK:
        raise ValueError(f"blocks of 128 need K and N to be multiples of it, found {k} and {n}")
    kinds = functional.ScalingType
    codes_a, _ = current_cast()(a).row_wise
    codes_b, _ = current_cast()(b).row_wise
    blocks = k // _BLOCK
    scale_a = torch.ones(blocks, m, device=a.device).t()
    padded = -(-blocks // _BLOCK_SCALES_PADDED_TO) * _BLOCK_SCALES_PADDED_TO
    scale_b = torch.ones(n // _BLOCK, padded, device=b.device)[:, :blocks]
    return lambda: functional.scaled_mm(
        codes_a, codes_b.t(), scale_a, kinds.BlockWise1x128, scale_b, kinds.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )  # fmt: skip
