"""Drives the core: makes plans, sends them to the executor, and commits the results.

`engine.py` is the entry point. It attaches to one executor after another (`attachment.py`), and a `session.py` serves
with each of them until it fails. `plan_timing.py` decides when the next plan is made.
"""
