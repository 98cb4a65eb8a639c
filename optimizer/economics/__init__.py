"""Hours, dollars and interruptions of fleets."""
