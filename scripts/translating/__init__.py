"""The parts of translation.py: corpus, vocabulary, model, alignment, search, lists of words, pruning."""
