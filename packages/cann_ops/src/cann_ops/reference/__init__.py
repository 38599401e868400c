"""What each op means, in plain PyTorch, float32. The same meaning as the ops of the same names in the sister packages.

A test of the project holds them equal to those; here they stand alone, since a package imports no sister.
"""
