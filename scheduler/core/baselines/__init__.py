"""Static and dynamic batching and contiguous KV allocation: baselines that the scheduler is measured against."""
