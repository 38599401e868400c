"""What each op means, in plain vectorised PyTorch, float32."""
