"""Device code that templates of hashing, look-up, compaction and all three in one share."""
