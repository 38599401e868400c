"""The public functions: checks, documentation and the choice of a backend."""
