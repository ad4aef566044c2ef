"""A deterministic simulation of the shell: the real supervisor, engine, servers, plan stream, device thread and client.

world.py            one seed: `quire serve` with its two services, clients, and what goes wrong
processes.py        processes that are stopped and killed, in one event loop with virtual time
quire_serve.py      the shipped supervisor over simulated processes
scheduler_host.py   schedulers, one process after the other
executor_host.py    executors, one process after the other; runner.py and model.py compute their steps
transport.py        plan streams in memory instead of gRPC
clients.py          the shipped client on calls in memory
requests.py         what the clients ask for, and the output that each must get
faults.py           errors that are drawn from the seed
events.py           what happens from outside; rivals.py has other peers of the executor
oracles.py          what must hold; cache_oracle.py checks the blocks that outlive a scheduler
put_back.py         old faults, which the oracles must find; more of them are in put_back_streams.py
report.py           what happened in many worlds, in numbers

python -m tests.simulation --seeds 0..9999 [--put-back NAME] [--report FILE]      python -m tests.simulation --log 17
"""
