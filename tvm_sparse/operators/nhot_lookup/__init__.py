"""N-hot lookup: sparse rows (CSR) times a dense table."""
