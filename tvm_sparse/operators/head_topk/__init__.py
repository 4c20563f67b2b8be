"""The exact output layer: product with the embedding, softmax and top-k in one."""
