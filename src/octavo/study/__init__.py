"""The study: what FP8 does to a language model, from text to report.

Data, a baseline trained in 16 bits, quantization without training, fine-tuning in FP8, a record and a report; see
`run_study`.
"""

from octavo.study.available import LIBRARIES
from octavo.study.corpus import DataError
from octavo.study.engine import PHASES, preflight, run_study
from octavo.study.progress import Progress, SilentProgress, Stop, StudyInterrupted, stop_on_interrupt
from octavo.study.report_phase import summarise
from octavo.study.resuming import PreflightError, planned, stored_settings
from octavo.study.settings import DTYPES, PRESETS, StudySettings

__all__ = [
    "DTYPES",
    "LIBRARIES",
    "PHASES",
    "PRESETS",
    "DataError",
    "PreflightError",
    "Progress",
    "SilentProgress",
    "Stop",
    "StudyInterrupted",
    "StudySettings",
    "planned",
    "preflight",
    "run_study",
    "stop_on_interrupt",
    "stored_settings",
    "summarise",
]
