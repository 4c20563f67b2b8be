"""Timing and comparison: what tuning, the commands and the scripts share."""
