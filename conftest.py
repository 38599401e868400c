"""The installed package first: test modules are named by their folders, and `orchestrator/tests` would otherwise make
an empty `orchestrator` of its own."""

import orchestrator  # noqa: F401
