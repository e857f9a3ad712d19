"""`python -m fdjax` is the command `fdjax`."""

import os
import signal
import sys


def main() -> int:
    """Run the command line; see `fdjax.cli.main`."""
    # Before the first import that takes long: until there is something to clean up, and after
    # there was, Ctrl-C just ends the process. A parent that has it ignored is obeyed.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from fdjax.cli.main import main

    return main()


if __name__ == "__main__":
    sys.exit(main())
