"""Costs beside the model: scheduler, streams, sampling, observability, recovery."""
