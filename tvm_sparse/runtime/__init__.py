"""From a manifest to a kernel call: look-up, loading, array interchange. Imports no compiler."""
