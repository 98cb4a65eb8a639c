"""The reference trainer: trains what a plan says, laid out as the plan says."""
