"""Sparse structures, checked and prepared on the host."""
