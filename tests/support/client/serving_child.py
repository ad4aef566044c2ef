"""Runs a scripted server in a separate process: `python -m tests.support.client.serving_child ADDRESS`.

It serves at once and ends with status 0 on SIGTERM.
"""

import signal
import sys
import threading

from tests.support.client.scripted_server import ScriptedServer

told_to_stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: told_to_stop.set())
server = ScriptedServer()
server.start(sys.argv[1])
print("serving", flush=True)
told_to_stop.wait()
server.stop()
