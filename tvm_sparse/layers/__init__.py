"""Layers composed of operators: a reduced output head, the search that decodes with it, a module for language models.

A layer keeps data for its operators between calls (hash tables, weights), chooses between its paths, and can explain
the choice. It has no kernels of its own.
"""
