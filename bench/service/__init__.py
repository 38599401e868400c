"""A service of several processes under clients and faults: `fathom bench service`."""
