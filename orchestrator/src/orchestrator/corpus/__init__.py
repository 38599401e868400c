"""The training corpus of the small models: sources, held-out texts, made-up conversations, and the dataset folder."""
