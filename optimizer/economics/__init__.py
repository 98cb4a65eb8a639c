"""Dollars, hours and interruptions."""
