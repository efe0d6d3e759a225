"""The libraries that the study cannot do without; importing this where one is absent names the extra that brings it."""

from octavo.report.extras import require

LIBRARIES = tuple(require(name, "octavo.study").__name__ for name in ("tokenizers", "safetensors"))
