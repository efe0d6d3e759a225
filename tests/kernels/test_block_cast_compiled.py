"""block_cast under the compiler: which of its two kernels a graph launches, how often, and the same bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from tests.kernels.matrices import with_specials
from torch import Tensor

pytest.importorskip("triton", reason="kernels are Triton's")

from tests.kernels.agreement import assert_same
from tests.kernels.traced_launches import Compiled, take_kernels_everywhere

from octavo.formats import E5M2
from octavo.kernels import CastOutput, ScaleRule
from octavo.kernels.block_cast import block_cast
from octavo.scaling import BLOCK_1X128, BLOCK_128X128

PACKED, GENERAL = "packed_block_cast_kernel", "block_cast_kernel"
# What is cast of x [rows, 160], and by which kernel if x is bf16.
VIEWS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "all of it": (lambda x: x, PACKED),
    "what was just computed": (lambda x: x * 2, PACKED),
    "four columns": (lambda x: x[:, :4], PACKED),
    "every second row": (lambda x: x[::2], PACKED),
    "transposed": (lambda x: x.t(), PACKED),
    "from a multiple of 16 bytes on": (lambda x: x[:, 8:], GENERAL),
    "from elsewhere on": (lambda x: x[:, 4:], GENERAL),
    "an odd width": (lambda x: x[:, :9], GENERAL),
    "an odd stride": (lambda x: x.view(-1)[: 159 * 10].view(10, 159)[:, :158], GENERAL),
    "one word a row": (lambda x: x[:, :2], GENERAL),
}


@pytest.fixture(autouse=True)
def kernels_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    take_kernels_everywhere(monkeypatch)


def cast(x: Tensor) -> CastOutput:
    return block_cast(x, E5M2, BLOCK_1X128, ScaleRule(), inf_to_nan=True, column_sum=True)


def launched(backend: Compiled) -> Counter[str]:
    return Counter({name: backend.launches[name] for name in (PACKED, GENERAL) if backend.launches[name]})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", VIEWS)
def test_words_are_taken_where_rows_are_known_to_be_of_words(name: str, dtype: torch.dtype) -> None:
    view, kernel = VIEWS[name]
    backend, x = Compiled(), with_specials(torch.randn(12, 160)).to(dtype)
    found = torch.compile(lambda x: cast(view(x)), backend=backend, fullgraph=True, dynamic=False)(x)
    assert_same(found[:4], cast(view(x))[:4])
    assert launched(backend) == {kernel if dtype.itemsize == 2 else GENERAL: 1}
    assert backend.clones == (name == "transposed")


@pytest.mark.parametrize("kernel", [PACKED, GENERAL])
def test_one_graph_serves_every_number_of_rows_beyond_a_block(kernel: str) -> None:
    """Of columns that are not known either nothing is asked, and elements are taken one by one."""
    backend = Compiled()
    compiled = torch.compile(cast, backend=backend, fullgraph=True)
    for rows in (131, 144, 600):
        x = torch.randn(rows, 160).bfloat16()
        torch._dynamo.mark_dynamic(x, 0)
        if kernel == GENERAL:
            torch._dynamo.mark_dynamic(x, 1)
        assert_same(compiled(x)[:4], cast(x)[:4])
    assert backend.graphs == 1
    assert launched(backend) == {kernel: 1}


@pytest.mark.parametrize("granularity", [BLOCK_1X128, BLOCK_128X128], ids=repr)
def test_the_same_cast_is_launched_once_and_another_one_too(granularity: object) -> None:
    def three(x: Tensor, y: Tensor) -> list[Tensor | None]:
        casts = [block_cast(one, E5M2, granularity, ScaleRule()) for one in (x, x, y)]
        # Something new that follows from the codes: what the graph hands out nobody else has.
        return [made.codes.float() for made in casts if made.codes is not None]

    backend, x, y = Compiled(), torch.randn(16, 160).bfloat16(), torch.randn(16, 160).bfloat16()
    found = torch.compile(three, backend=backend, fullgraph=True)(x, y)
    assert_same(found, three(x, y))
    assert launched(backend) == {PACKED: 2}
    assert backend.clones == 0
