"""Deterministic simulation of the service: the real role cores under a virtual clock, with faults from one seed.

`docs/simulation.md` says how to read and replay a run. Nothing here imports torch or looks at the real clock.
"""
