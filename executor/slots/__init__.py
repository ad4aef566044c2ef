"""The executor's persistent batch: what is known of each slot, and how a plan becomes the inputs of a step."""
