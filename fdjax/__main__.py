"""`python -m fdjax` is the command `fdjax`."""

import sys

from fdjax.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
