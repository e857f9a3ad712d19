"""Progress bars, which are shown if standard error is a terminal."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

# Seconds before a bar for answers appears, so that short calls show nothing.
_DELAY = 2.0


def in_terminal() -> bool:
    """Whether standard error is a terminal."""
    return sys.stderr is not None and sys.stderr.isatty()


@contextlib.contextmanager
def loading(name: str, show: bool | None = None) -> Iterator[Callable[[int, int], None]]:
    """A bar for bytes.

    Args:
      name: what is loaded.
      show: whether to show the bar; default if standard error is a terminal.

    Yields:
      update(bytes done, bytes in all).
    """
    if not (in_terminal() if show is None else show):
        yield lambda done, total: None
        return
    from tqdm import tqdm

    with tqdm(desc=name, unit="B", unit_scale=True, leave=False) as bar:

        def update(done, total):
            bar.total = total
            bar.update(done - bar.n)

        yield update


@contextlib.contextmanager
def answers(total: int) -> Iterator[Callable[..., None] | None]:
    """A bar for a number of answers.

    Yields:
      update(answers that are complete, tokens so far, text=""), or None if no bar is shown.
    """
    if total < 2 or not in_terminal():
        yield None
        return
    from tqdm import tqdm

    began = time.monotonic()
    with tqdm(total=total, unit="answer", leave=False, delay=_DELAY) as bar:

        def update(done, tokens, text=""):
            rate = f"{tokens / max(time.monotonic() - began, 1e-9):.0f} tokens/s"
            bar.set_postfix_str(f"{rate}{', ' * bool(text)}{text}", refresh=False)
            bar.update(done - bar.n)

        yield update
