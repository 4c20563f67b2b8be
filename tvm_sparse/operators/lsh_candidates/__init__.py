"""Candidate words of hidden states: hash, look-up and compaction in one program."""
