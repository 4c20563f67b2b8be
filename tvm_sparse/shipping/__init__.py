"""Exporting tuned records as folders of libraries."""
