"""The operators: one folder for each. `core.registry` finds them by name and describes their modules."""
