"""Profile of a torch module: parameters, FLOPs and memory, counted on fake tensors without a GPU (docs/models.md)."""
