"""Starting, watching and ending worker processes; their launchers."""
