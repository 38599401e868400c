"""Persistent stores behind one interface: embedded, a shared directory, Mooncake Store, erasure-coded targets."""
