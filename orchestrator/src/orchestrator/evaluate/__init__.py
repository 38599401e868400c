"""How good a model is: figures that a trained checkpoint is held to, computed with the engine's own functions."""
