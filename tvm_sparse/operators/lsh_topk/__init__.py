"""A step of an LSH head, from hidden states to the best candidate words, in one program."""
