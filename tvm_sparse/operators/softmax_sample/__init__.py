"""Sampling of a word of each row of logits, after temperature, top-k, top-p and min-p."""
