"""Winner-take-all hashing: band codes of hidden states."""
