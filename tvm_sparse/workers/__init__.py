"""Supervised child processes, and the one that builds candidates."""
