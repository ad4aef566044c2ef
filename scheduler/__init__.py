"""The scheduler service: tokenises, queues, batches, owns the block tables; drives one executor. CPU only, no torch."""
