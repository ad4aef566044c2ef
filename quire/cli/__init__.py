"""The command line: `main.py` lists the commands. `serve.py` starts the services, and `supervisor.py` restarts them."""
