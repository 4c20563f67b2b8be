"""What was measured: `<arch>/<operator>/trials.jsonl` and `best.jsonl` (see `tvm_sparse.records`)."""
