"""The code of a node: set-up, health checks, smoke test, training runtime. Imports nothing else of gpufleet."""
