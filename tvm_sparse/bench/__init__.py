"""Timing and comparison, shared by tuning, the commands and the scripts."""
