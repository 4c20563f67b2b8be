"""Stream compaction: the words of a bitmap as a list."""
