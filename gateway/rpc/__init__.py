"""The gRPC server of the gateway: the calls of quire.v1 for generation, made on behalf of its clients."""
