"""From one decision to a shared library with a manifest that refuses to lie."""
