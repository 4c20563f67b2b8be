"""The ground floor: what a machine, a problem, a template and a candidate are, and which operators there are.

Nothing here imports another room of the package; operators and templates are found by name (`registry`, `spaces`).
"""
