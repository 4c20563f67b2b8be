"""The sampled dense-dense product at the pattern of a block-sparse matrix: the gradient of its blocks."""
