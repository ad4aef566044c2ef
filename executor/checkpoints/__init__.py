"""Reads checkpoints: config.json, safetensors files, and the share of the weights that one rank holds."""
