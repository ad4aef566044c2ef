"""Simulates a fleet: many scheduler cores on one virtual clock, behind the shipped choice of a replica.

sources ─► router: gateway.routing chooses ─► replica: core and executor (planning/virtual_server.py)
             ▲                                   │
             └── reports: delayed, lost ◄────────┘   changes of the prefix index, load; a gap: a snapshot
"""
