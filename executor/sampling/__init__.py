"""Makes tokens, log-probabilities and the other reports of a step from its logits."""
