"""`python -m fdjax` is the command `fdjax`."""

import os
import signal
import sys


def main() -> int:
    """Run the command line; see `fdjax.cli.main`."""
    # This comes before the first slow import. While there is nothing to clean up, Ctrl-C simply
    # ends the process. If the parent process ignores SIGINT, it stays ignored.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from fdjax.cli.main import main

    return main()


if __name__ == "__main__":
    sys.exit(main())
