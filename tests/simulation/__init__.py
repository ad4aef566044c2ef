"""A deterministic simulation of the shell: the real engine, servers, plan stream and device thread in virtual time.

world.py      one seed: a scheduler, an executor that dies and comes back, clients, and what goes wrong
transport.py  calls in memory instead of gRPC    executor_host.py  executors, one process after the other
clients.py    requests and their readers         faults.py         what goes wrong, drawn from the seed
oracles.py    what must hold                     put_back.py       old faults, which the oracles must find

python -m tests.simulation --seeds 0..9999 [--put-back NAME]      python -m tests.simulation --log 17
"""
