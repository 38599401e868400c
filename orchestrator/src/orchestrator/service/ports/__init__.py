"""What stands behind the cores of a worker: engines whose states travel by ticket, and the image encoder."""
