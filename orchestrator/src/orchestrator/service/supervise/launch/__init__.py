"""How worker processes are started and watched: as children of the front, or by actors of Ray."""
