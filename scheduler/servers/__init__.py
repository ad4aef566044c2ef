"""The scheduler's ports: gRPC and HTTP servers, the access checks in front of them, and what bounds their callers."""
