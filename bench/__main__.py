"""`python -m bench ...` at the project root; `fathom bench ...` ends here."""

import sys

from bench.main import run

sys.exit(run(sys.argv[1:]))
