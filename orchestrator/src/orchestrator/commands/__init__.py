"""What the command line does, one command a module. `orchestrator.cli` imports them when they are called."""
