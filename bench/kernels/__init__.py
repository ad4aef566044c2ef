"""Time and rate of every kernel."""
