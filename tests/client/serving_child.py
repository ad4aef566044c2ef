"""A scripted server as a process of its own, for tests of what is around it: `python serving_child.py ADDRESS`.

It serves at once and ends with status 0 on SIGTERM.
"""

import signal
import sys
import threading

from scripted_server import ScriptedServer

told_to_stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: told_to_stop.set())
server = ScriptedServer()
server.start(sys.argv[1])
print("serving", flush=True)
told_to_stop.wait()
server.stop()
