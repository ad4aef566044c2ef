"""Estimates how many sequences a deployment holds and how fast it is.

`quire plan` computes figures from sizes and data sheets; `quire simulate` runs the shipped scheduler core on a virtual
clock. The package imports only the scheduler's core and its timing of plans; it needs no device, torch or server.
"""
