"""Callbacks for training engines with a loop of their own: notices, safe checkpoints and the ledger."""
