"""Templates of the output layer: products of hidden states with words of a vocabulary, and the best of these."""
