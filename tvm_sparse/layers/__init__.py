"""Layers composed of operators: a reduced output head, the search that decodes with it, a module for language models.

A layer keeps what its operators need between calls (hash tables, weights), chooses between its paths, and says which it
took and why. It has no kernels of its own.
"""
