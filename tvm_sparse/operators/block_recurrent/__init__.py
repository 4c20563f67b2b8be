"""A recurrent layer whose recurrent weight is in blocks, or dense, for tensor cores."""
