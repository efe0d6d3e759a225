"""AdviceError: what was asked cannot be answered; the message says why and what to do."""

from __future__ import annotations


class AdviceError(ValueError):
    """Bad input to `octavo advise`."""
