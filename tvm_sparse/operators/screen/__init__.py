"""Words that may be among the best of a row whose scores are known within bounds."""
