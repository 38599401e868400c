"""The process that clients talk to: an engine for the HTTP server over the entry's core."""
