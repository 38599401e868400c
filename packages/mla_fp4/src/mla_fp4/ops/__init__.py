"""Public ops, one file an idea: checks, docstring, and the choice of a backend."""
