"""Data of a training run: synthetic samples, token files, image folders, and the loader in front of them."""
