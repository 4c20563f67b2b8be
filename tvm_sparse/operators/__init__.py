"""What is computed: one folder an operator. `core.registry` tells what lies in it, and finds it by name."""
