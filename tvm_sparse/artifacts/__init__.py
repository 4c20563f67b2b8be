"""From a candidate to a shared library with a checked manifest."""
