"""Checks of ``gpufleet preflight``, one file a concern; every call only reads, and ``run`` has their list."""
