"""Facts that deciding, deploying, nodes and controller share. Standard library only."""
