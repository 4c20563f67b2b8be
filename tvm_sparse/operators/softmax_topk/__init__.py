"""Fused softmax and top-k."""
