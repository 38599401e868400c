"""The I/O process: it alone talks to the store, fills the host tier, and outlives the engines that it serves."""
