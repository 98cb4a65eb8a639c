"""Memory and speed of a training step."""
