"""The facts that deciding, deploying, nodes and controller share: each stands here once.

The only part of bootstrap that infra and optimizer import. Standard library only: the contract travels with the nodes'
bundle and with the controller's zip.
"""
