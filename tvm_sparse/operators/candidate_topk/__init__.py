"""Softmax and top-k over candidate words: a gathered product with their embeddings."""
