"""Templates of the made-up conversations. All text in here was written for this project."""
