"""Training of the small models: corpus, optimiser, loop and export."""
