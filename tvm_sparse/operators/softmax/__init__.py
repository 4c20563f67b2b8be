"""Softmax over rows: the naive, safe and online algorithms."""
