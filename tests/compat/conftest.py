"""What holds in the tests of other libraries' names."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    """Models compiled by earlier tests share one limit of recompiles with those of this one."""
    yield
    torch._dynamo.reset()
