"""Public ops, one file an idea: checks, docstring, and the kernel that runs."""
