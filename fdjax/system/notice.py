"""A temporary note in the terminal during a long operation."""

import shutil
import sys


class Notice:
    """A text at the cursor of a terminal on standard error, which can be removed again.

    If standard error is no terminal, nothing is shown.
    """

    def __init__(self):
        self._shown = ""

    def show(self, text: str) -> None:
        """Show a text until `clear` is called."""
        if sys.stderr is None or not sys.stderr.isatty():
            return
        # Text that wraps to the next line cannot be removed, and the line may hold a first token.
        room = max(0, shutil.get_terminal_size().columns - 24)
        self._shown = f" [{text}]"[:room]
        print(self._shown, end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Remove the text, if one is shown."""
        if self._shown:
            back = "\b" * len(self._shown)
            print(back + " " * len(back) + back, end="", file=sys.stderr, flush=True)
            self._shown = ""
