"""Estimates how many sequences a deployment holds and how fast it is.

`quire plan` computes figures from sizes and data sheets; `quire simulate` runs the shipped scheduler core on a virtual
clock. The package imports only the scheduler's core, its timing of plans, and the choice of a replica
(`gateway.routing`). It needs no device, torch or server.
"""
