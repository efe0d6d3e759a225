"""Ceilings of the device: copying, and matrix products in bf16 and in each kind of FP8 that torch offers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from octavo.bench.cuda_graphs import num_sets
from octavo.bench.operands import Cast, current_cast, rowwise_cast
from octavo.bench.record import Row
from octavo.bench.roofline import matmul_flops
from octavo.bench.session import Session, reason_of
from octavo.bench.shapes import Shape
from octavo.bench.timing import Call, Measure, interleaved
from octavo.kernels.block_cast.layout import scale_shape
from octavo.kernels.scaled_mm.blockwise import block_scaled_mm_native, unsupported_reasons
from octavo.scaling import BLOCK_1X128, BLOCK_128X128

Product = Callable[[Tensor, Tensor], Call]


def measure_ceilings(session: Session) -> None:
    """Rows `ceiling`: the rate of copying, then of each kind of product at each shape."""
    with session.spending("copy"):
        measure_copy(session)
    for shape in session.shapes.matmuls:
        if not session.fits({"kind": "ceiling", "name": "bf16", "shape": list(shape)}):
            continue
        with session.spending("products"):
            measure_products(session, shape)


def measure_copy(session: Session) -> None:
    """The `ceiling` rows of copying, one a size, unless there are any: the fastest is the ceiling."""
    if session.ceilings.copy is not None:
        return
    abouts: dict[str, Row] = {}
    measures: dict[str, Measure] = {}
    held = []  # a captured graph does not keep its tensors alive
    for num_bytes in session.shapes.copies:
        sets = num_sets(num_bytes, session.cache_bytes)
        about: Row = {"kind": "ceiling", "name": "copy", "shape": [num_bytes], "dtype": "bfloat16", "sets": sets}
        about["method"] = session.timer.method
        try:
            sources = [_bf16(session, num_bytes) for _ in range(sets)]
            targets = [torch.empty_like(source) for source in sources]
            calls: list[Call] = [partial(to.copy_, source) for to, source in zip(targets, sources, strict=True)]
            measures[str(num_bytes)] = session.timer.prepare(calls)
            abouts[str(num_bytes)] = about
            held.append((sources, targets))
        except Exception as error:  # too large for this device; the others go on
            session.failed(about, error)
    for name, timing in interleaved(measures, session.rounds, session.dropped).items():
        moved = 2 * int(name)  # read and written
        figures = {"bytes": moved, "per_s": moved / timing.median, "unit": "B/s"}
        session.measured(abouts[name], timing.row() | figures)
    del held, measures
    session.release()


def _bf16(session: Session, num_bytes: int) -> Tensor:
    """N(0, 1) in bf16, as the matrices that are cast."""
    return torch.randn(num_bytes // 2, device=session.device, dtype=torch.bfloat16)


def measure_products(session: Session, shape: Shape) -> None:
    """The `ceiling` rows of the products of one shape, unless they were measured before."""
    m, k, n = shape
    known = [row for row in session.record.of_kind("ceiling") if row["status"] == "measured"]
    if any(row["name"] == "bf16" and row["shape"] == list(shape) for row in known):
        return
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
    del pairs, measures
    session.release()


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
    """[m, k] @ [n, k]^T, scales of 1 x 128 blocks of a and of 128 x 128 blocks of b, as Octavo's own Linear calls it.

    The scales are ones: the product takes as long whatever they are.

    Raises:
        ValueError: the device or torch has no such product, or not of this shape.
    """
    codes_a, _ = current_cast()(a).row_wise
    codes_b, _ = current_cast()(b).row_wise
    if reasons := unsupported_reasons(codes_a, codes_b):
        raise ValueError("; ".join(reasons))
    (m, k), n = a.shape, b.shape[0]
    scale_a = torch.ones(scale_shape(m, k, BLOCK_1X128), device=a.device)
    scale_b = torch.ones(scale_shape(n, k, BLOCK_128X128), device=b.device)
    return lambda: block_scaled_mm_native(codes_a, codes_b, scale_a, scale_b, None, torch.bfloat16)
