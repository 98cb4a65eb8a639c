"""Spot policies replayed over traces of availability: cost, missed deadlines, interruptions."""
