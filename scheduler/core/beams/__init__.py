"""Beam search: which continuations survive, and the beams of a request as sequences."""
