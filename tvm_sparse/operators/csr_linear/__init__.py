"""A dense matrix times a transposed sparse one in CSR format: linear layers with unstructured weights."""
