"""The benchmark runner: finds the benches of all packages, times them, keeps the ledger, writes the tables."""
