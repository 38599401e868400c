"""The roles as processes: a front with entry and HTTP, a router, encoders, prefill and decode workers.

See docs/service.md.
"""
