"""Instance types, GPUs and prices."""
