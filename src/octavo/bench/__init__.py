"""The bench: what Octavo costs and gains in time and memory, beside bf16 and every peer that can be imported.

Ceilings of the card, casts, one Linear on the device's time and on the host's, whole training steps; see `run_bench`.
"""

from octavo.bench.engine import run_bench
from octavo.bench.joining import joined_records, with_targets
from octavo.bench.settings import DEFAULT_SECTIONS, MODELS, SECTIONS, BenchSettings

__all__ = ["DEFAULT_SECTIONS", "MODELS", "SECTIONS", "BenchSettings", "joined_records", "run_bench", "with_targets"]
