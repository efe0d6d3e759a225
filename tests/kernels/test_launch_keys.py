"""Keys of the kernels' launches against Triton's own binder: equal keys, equal variants; and few of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from tests.kernels.sources import KINDS, RULES, given, rule_of
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.variants import Launch, launches_of, specialized

from octavo.formats import E4M3, E5M2
from octavo.kernels.amax import triton_kernel as amax_kernels
from octavo.kernels.cast_transpose import launch as cast_kernels
from octavo.kernels.cast_transpose import unsupported_reasons
from octavo.kernels.delayed_update import triton_kernel as update_kernels

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(1, 1), (1, 16), (16, 1), (7, 13), (16, 16), (17, 32), (64, 48), (5, 1), (1, 17)]


def views(shape: tuple[int, int], dtype: torch.dtype) -> Iterator[Tensor]:
    """Rows that are contiguous: as allocated, of a wider matrix, and not at a multiple of 16 bytes."""
    rows, columns = shape
    yield torch.ones(shape, dtype=dtype)
    yield torch.ones(rows, columns + 16, dtype=dtype)[:, :columns]
    yield torch.ones(rows, columns + 3, dtype=dtype)[:, :columns]
    yield torch.ones(rows, columns + 1, dtype=dtype)[:, 1:]
    yield torch.ones(columns, rows, dtype=dtype).t()


def assert_keys_decide(kernel: Any, launches: list[Launch]) -> dict[Any, list[tuple[str, Any]]]:
    variants: dict[Any, list[tuple[str, Any]]] = {}
    assert launches
    for launch in launches:
        variant = specialized(kernel, launch)
        assert variants.setdefault((launch.key, launch.warps), variant) == variant, launch.key
    return variants


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_casts_with_equal_keys_are_one_variant_of_tritons(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    def call() -> None:
        for shape, kind in product(SHAPES, KINDS):
            for x in views(shape, dtype):
                rowwise, columnwise = given(kind, x)
                # Scales lie anywhere: here 4 bytes after a multiple of 16.
                shifted = [apart(source) for source in (rowwise, columnwise)]
                for number, pair in enumerate(((rowwise, columnwise), shifted)):
                    if number and rowwise is columnwise:
                        pair[1] = pair[0]  # type: ignore[index]
                    flags: dict[str, Any] = {"gathered": torch.zeros(2)[number]} if len(kind) % 2 else {}
                    format, rule = (E4M3, E5M2)[number], rule_of(kind, RULES[number])
                    cast_kernels.cast_transpose_triton(x, format, *pair, rule, **flags, column_sum=bool(number))

    launches = launches_of(monkeypatch, cast_kernels, "_launch_kernel", call)
    variants = assert_keys_decide(cast_kernels.cast_transpose_kernel, launches)
    assert len(variants) > len(KINDS)


def apart(source: Tensor | None) -> Tensor | None:
    if source is None:
        return None
    flat = source.new_zeros(source.numel() + 1)
    flat[1:] = source.flatten()
    return flat[1:].view(source.shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_amaxes_with_equal_keys_are_one_variant_of_tritons(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    shapes = [*SHAPES, (3, 9000), (9000, 3), (4096, 64)]

    def parts() -> None:
        for shape in shapes:
            for x in views(shape, dtype):
                amax_kernels.partial_amax_triton(x)

    # Words of two elements: see test_amax_packed.py.
    monkeypatch.setattr(amax_kernels, "_launch_packed", lambda *_: None)

    def both() -> None:
        for shape, wanted in product(shapes, ((True, True), (True, False), (False, True))):
            for x in views(shape, dtype):
                amax_kernels.amax_by_row_and_column_triton(x, *wanted)

    assert_keys_decide(
        amax_kernels.partial_amax_kernel, launches_of(monkeypatch, amax_kernels, "_launch_partial", parts)
    )
    assert_keys_decide(
        amax_kernels.amax_by_row_and_column_kernel,
        launches_of(monkeypatch, amax_kernels, "_launch_by_row_and_column", both),
    )


def test_the_number_of_rows_makes_no_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is that of the tokens, which changes from batch to batch."""
    some = [torch.ones(rows, 64, dtype=torch.bfloat16) for rows in (1, 2, 15, 16, 17, 32, 100, 4096)]

    def call() -> None:
        for x in some:
            cast_kernels.cast_transpose_triton(x, E4M3, *given("row and column", x))
            cast_kernels.cast_transpose_triton(x, E4M3, *given("row and column", x), column_sum=True)

    kernel = cast_kernels.cast_transpose_kernel
    variants = assert_keys_decide(kernel, launches_of(monkeypatch, cast_kernels, "_launch_kernel", call))
    assert len(variants) == 2
    place = kernel.arg_names.index("rows")
    assert all(variant[place] == ("i32", None) for variant in variants.values())

    def both() -> None:
        for x in some:
            amax_kernels.amax_by_row_and_column_triton(x.float(), True, True)

    kernel = amax_kernels.amax_by_row_and_column_kernel
    launches = launches_of(monkeypatch, amax_kernels, "_launch_by_row_and_column", both)
    assert len(assert_keys_decide(kernel, launches)) == 1


def test_how_many_operands_are_of_which_format_makes_no_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    def call() -> None:
        for first, number in ((1, 2), (2, 3), (16, 24), (256, 384)):
            history, ones = torch.zeros(number, 16), torch.ones(number)
            update_kernels.delayed_update_triton(history, ones, ones, (448.0, 57344.0), first, 0, "max")

    launches = launches_of(monkeypatch, update_kernels, "_launch_kernel", call)
    assert len(assert_keys_decide(update_kernels.delayed_update_kernel, launches)) == 1
    assert len({launch.key for launch in launches}) == 1

    def in_place() -> None:
        for first, number in ((1, 2), (2, 3), (16, 24), (256, 384)):
            addresses = torch.zeros(number, 3, dtype=torch.int64)
            update_kernels.in_place_launch(addresses, 16, (448.0, 57344.0), first, 0, "max")()

    launches = launches_of(monkeypatch, update_kernels, "_launch_in_place", in_place)
    assert len(assert_keys_decide(update_kernels.delayed_update_in_place_kernel, launches)) == 1
    assert len({launch.key for launch in launches}) == 1


def test_extents_make_variants_by_their_common_alignment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the columns and of the stride; as none of them becomes a 1, none becomes a constant, one column aside."""
    some = [torch.ones(3, 400, dtype=torch.bfloat16)[:, :n] for n in (32, 48, 64)]
    some += [torch.ones(3, n, dtype=torch.bfloat16) for n in (2, 3, 7, 4, 6, 8, 12, 24, 16, 40, 32, 8184, 8188, 8190)]

    def call() -> None:
        for x in some:
            cast_kernels.cast_transpose_triton(x, E4M3, *given("shared", x))

    with monkeypatch.context() as patched:
        launches = launches_of(patched, cast_kernels, "_launch_kernel", call)
    variants = assert_keys_decide(cast_kernels.cast_transpose_kernel, launches)
    aligned = [launch.constants[0] for launch in launches]
    assert aligned == [16, 16, 16, 1, 1, 1, 2, 2, 4, 4, 8, 8, 8, 16, 8, 4, 2]
    assert len(variants) == len(set(aligned))
    for launch, x in zip(launches, some, strict=True):
        assert [number * launch.constants[0] for number in launch.numbers[1:]] == [x.shape[1], x.stride(0)]
        assert 1 not in launch.numbers


def test_more_than_31_bits_of_rows_are_another_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix without memory behind it: every row is the same one."""
    tall = torch.ones(1, 16).expand(2**31 + 16, 16)

    def call() -> None:
        for x in (torch.ones(16, 16), tall):
            amax_kernels.partial_amax_triton(x)

    kernel = amax_kernels.partial_amax_kernel
    short, long = launches_of(monkeypatch, amax_kernels, "_launch_partial", call)
    place = kernel.arg_names.index("rows")
    assert [specialized(kernel, launch)[place] for launch in (short, long)] == [("i32", None), ("i64", None)]
    assert short.key.parts[2] != long.key.parts[2]


def test_a_small_matrix_has_smaller_blocks_than_a_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = torch.ones(64, 64), torch.ones(1, 16384).expand(2048, 16384)
    scale = torch.ones(())

    def call() -> None:
        for x in (small, large):
            cast_kernels.cast_transpose_triton(x, E4M3, scale, None, column_sum=True)

    with monkeypatch.context() as patched:
        launches = launches_of(patched, cast_kernels, "_launch_kernel", call)
    place = cast_kernels.cast_transpose_kernel.arg_names.index("BLOCK_ROWS") - len(launches[0].tensors) - 3
    assert [launch.constants[place] for launch in launches] == [
        cast_kernels._BLOCK[0],
        cast_kernels._BLOCK_LARGE[0],
    ]
    for launch, x in zip(launches, (small, large), strict=True):
        tall = -(-x.shape[0] // launch.constants[place])
        assert launch.programs == tall * -(-x.shape[1] // cast_kernels._BLOCK[1])


def test_a_row_with_gaps_is_not_made_a_column(monkeypatch: pytest.MonkeyPatch) -> None:
    """One column is what ptxas miscompiles, see `one_column_reasons`."""
    x = torch.ones(333, 7)[:, :1].t()
    assert x.shape == (1, 333)
    assert x.stride() == (1, 7)

    def call() -> None:
        cast_kernels.cast_transpose_triton(x, E4M3, torch.ones(()), None)

    with monkeypatch.context() as patched:
        (launch,) = launches_of(patched, cast_kernels, "_launch_kernel", call)
    assert launch.numbers[:2] == (1, 333)
    assert "one column" in unsupported_reasons(torch.ones(5, 1), E4M3)[-1]
    assert not any("one column" in reason for reason in unsupported_reasons(torch.ones(1, 5), E4M3))
