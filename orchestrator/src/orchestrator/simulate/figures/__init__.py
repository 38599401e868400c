"""Figures of the service: capacity and policies on recorded traffic, by arithmetic and discrete-event simulation.

The GPU of these figures is a set of published constants (`published.py`); the decisions are those of `balance`.
`fathom figures` runs every study and writes `docs/service_figures.md` with its pictures.
"""
