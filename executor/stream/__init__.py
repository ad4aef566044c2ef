"""The plan stream from the executor's side: leases, the order of plans, and the gRPC service."""
