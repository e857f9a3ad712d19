"""A request that runs while its caller does something else."""

import atexit
import contextlib
import weakref
from collections.abc import Iterator

from fdjax.engine.results import GenerateResult, Timer
from fdjax.engine.runner import Call, Runner
from fdjax.engine.sequence import RequestState


class RunningRequest(Iterator[str]):
    """The answers to one prompt, in the making; what `LM.submit` returns.

    It is an iterator over the text as it comes, and may be used from any thread.
    """

    def __init__(
        self, runner: Runner, rows: list[RequestState], steps: int, timer: Timer, with_text: bool
    ):
        self._runner = runner
        self._rows = rows
        self._timer = timer
        self._with_text = with_text
        self._call = Call(rows, steps, timer.chunk)
        _running.add(self)
        runner.submit(self._call)

    @property
    def done(self) -> bool:
        """Whether it has ended, by itself, by an error or by `cancel`."""
        return self._call.ended

    def __next__(self) -> str:
        """The next piece of the text.

        Raises:
          Exception: what ended the request.
        """
        if len(self._rows) > 1 or self._rows[0].width > 1:
            raise ValueError(
                "submit: num_return_sequences and num_beams must be 1 to iterate over the text"
            )
        (row,) = self._rows
        pieces: list[str] = []

        def has_piece():
            if piece := row.new_text():
                pieces.append(piece)
            return bool(pieces)

        self._runner.wait(self._call, has_piece)
        if not pieces:
            self._raise_error()
            raise StopIteration
        return "".join(pieces)

    def result(self, timeout: float | None = None) -> GenerateResult:
        """Wait for the whole answer; of a cancelled request, for what there is.

        Args:
          timeout: seconds to wait; default without end.

        Raises:
          TimeoutError: it takes longer. The request goes on.
          Exception: what ended the request.
        """
        self._runner.wait(self._call, timeout=timeout)
        self._raise_error()
        return GenerateResult.of(self._rows, self._timer, with_text=self._with_text)

    def cancel(self) -> None:
        """End it now; what it has so far stays."""
        self._runner.cancel(self._call)

    def _raise_error(self) -> None:
        for row in self._rows:
            if row.error is not None:
                raise row.error


_running: weakref.WeakSet[RunningRequest] = weakref.WeakSet()


@atexit.register
def _cancel_all() -> None:
    """While there still are modules to end them with."""
    for request in list(_running):
        with contextlib.suppress(Exception):
            request.cancel()
            request._runner.join(timeout=10)
