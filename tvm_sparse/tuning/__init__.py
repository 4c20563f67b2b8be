"""Tuning: spaces, trials and records. MetaSchedule searches; this package verifies, measures and records."""
