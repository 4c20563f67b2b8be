"""The logarithm of softmax's normaliser."""
