from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.distributed.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Two processes of one gloo group."""
    both = Ranks()
    yield both
    both.stop()
