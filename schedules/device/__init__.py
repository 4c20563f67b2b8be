"""Code within kernels that operators share: words, keys, selection, clusters, overlapping launches, balance; for CPUs,
exponentials and sums in vectors."""
