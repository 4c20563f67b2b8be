"""Spaces, trials and records: MetaSchedule does the search, this package makes it honest."""
