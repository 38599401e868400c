"""A worker process: `python -m orchestrator.service.process` with a `WorkerSpec` on its standard input."""
