"""The choice of a replica for a request: pure state and functions, without I/O and without a clock.

    load.py         what a replica reports of its load
    prefix_view.py  the mirror of one replica's prefix index; holders.py joins the mirrors of all
    replica.py      what one router knows of one replica, its own choices included; replicas.py of all
    ring.py         consistent hashing with bounded loads
    choice.py       the interface of a choice, and the four choices: round robin, least loaded, ring, cost
    fair_line.py    the requests that wait while all replicas are full, in fair order by tenant

A router has no state of its own: everything here is rebuilt from what replicas report. So any number of
routers can work side by side, and the simulator (planning/) uses the same code.
"""
