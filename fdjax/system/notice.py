"""What a terminal shows for as long as something takes."""

import shutil
import sys


class Notice:
    """A text at the cursor of a terminal on standard error, taken back afterwards.

    Where standard error is no terminal, nothing is shown.
    """

    def __init__(self):
        self._shown = ""

    def show(self, text: str) -> None:
        """Show a text, until `clear`."""
        if sys.stderr is None or not sys.stderr.isatty():
            return
        # The first token of an answer may be on this line; what wraps cannot be taken back.
        room = max(0, shutil.get_terminal_size().columns - 24)
        self._shown = f" [{text}]"[:room]
        print(self._shown, end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Take the text back, if there is one."""
        if self._shown:
            back = "\b" * len(self._shown)
            print(back + " " * len(back) + back, end="", file=sys.stderr, flush=True)
            self._shown = ""
