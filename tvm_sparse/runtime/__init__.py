"""From manifests and records to kernel calls: look-up, loading, array interchange. Imports no compiler."""
