"""Logits of candidate words: a gathered product with their embeddings."""
