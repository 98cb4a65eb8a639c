"""Real, small programs that show gpufleet at work."""
