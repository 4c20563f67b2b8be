"""Measurements on disk: values, their lines, append-only logs, and queries over several logs."""

from .log import LOCK_SECONDS, Contents, Log, Skipped
from .values import MEASURED, OUTCOMES, REASON_LENGTH, Best, Record, Session, Trial, operator_of, utc_now

__all__ = [
    "LOCK_SECONDS",
    "MEASURED",
    "OUTCOMES",
    "REASON_LENGTH",
    "Best",
    "Contents",
    "Log",
    "Record",
    "Session",
    "Skipped",
    "Trial",
    "operator_of",
    "utc_now",
]
