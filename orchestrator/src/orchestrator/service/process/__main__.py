"""`python -m orchestrator.service.process`."""

from orchestrator.service.process.main import main

if __name__ == "__main__":
    main()
