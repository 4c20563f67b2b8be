"""Locality sensitive look-up: the words that share enough band codes with a list's hidden states."""
