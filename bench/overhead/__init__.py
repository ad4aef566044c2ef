"""Costs in addition to the model: scheduler, streams, sampling, observability, recovery."""
