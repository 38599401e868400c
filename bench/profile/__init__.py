"""`fathom bench profile`: a trace of some decode steps."""
