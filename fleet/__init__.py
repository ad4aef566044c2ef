"""`quire fleet`: a controller that keeps replicas and gateways running, on one machine or on a Ray cluster.

`wanted.py`, `autoscale.py`, `restarts.py` and `reconcile.py` decide, without I/O; `controller.py` acts through a
`backend.py`, which is `local.py` or `ray_backend.py`.
"""
