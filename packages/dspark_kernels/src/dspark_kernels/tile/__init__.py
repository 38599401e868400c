"""TileLang programs of the schedule and of verification. Importing this package needs no tilelang; its programs do.

They are for comparison and for targets without kernels of their own; the ops do not run them by themselves.
"""
