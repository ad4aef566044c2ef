"""The command line: `main.py` lists the commands. `serve.py` starts the services, and `supervisor.py` restarts them."""

import os

# gRPC would write a line for each failed handshake, as fast as strangers make them. It reads this when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
