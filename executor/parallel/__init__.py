"""Tensor parallelism: several processes hold a share of the model each, and compute every step together."""
