"""``gpufleet preflight``: check that this AWS account can carry out a plan today, before anything is created or paid.

Every call only reads. ``run`` has the list of checks. A check without an answer yields "unknown", never a guess.
"""
