"""Device code that operators share: words, keys, selection, clusters, overlapping launches, balance."""
