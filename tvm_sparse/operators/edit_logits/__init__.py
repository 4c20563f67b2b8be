"""Penalties and biases of single words of each row of logits."""
