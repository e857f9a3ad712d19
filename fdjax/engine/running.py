"""A request that runs in the background."""

import types
from collections.abc import Iterator

from fdjax.engine.results import GenerateResult, Timer
from fdjax.engine.runner import Runner
from fdjax.engine.sequence import RequestState
from fdjax.engine.task import Call
from fdjax.text.tokenizer import MissingTokenizerError


class RunningRequest(Iterator[str]):
    """A request in progress: the answers to one prompt. `LM.submit` returns it.

    It iterates over the pieces of the text as they come. Any thread may use it.
    """

    def __init__(
        self, runner: Runner, rows: list[RequestState], steps: int, timer: Timer, with_text: bool
    ):
        self._runner = runner
        self._rows = rows
        self._timer = timer
        self._with_text = with_text
        self._call = Call(rows, steps, timer.chunk)
        self._traceback: types.TracebackType | None = None
        runner.submit(self._call)

    def __repr__(self) -> str:
        state = "running"
        if self.done:
            state = "failed" if any(row.error for row in self._rows) else "ended"
        return f"RunningRequest({state}, {sum(len(row.tokens) for row in self._rows)} tokens)"

    @property
    def done(self) -> bool:
        """Whether the request has ended: finished, failed or cancelled."""
        return self._call.ended

    def __next__(self) -> str:
        """The next piece of the text.

        Raises:
          MissingTokenizerError: there is no tokenizer.
          ValueError: the request has several answers.
          Exception: the error that ended the request.
        """
        if not self._with_text:
            raise MissingTokenizerError(
                "submit: no tokenizer, so there is no text; `result()` has the token ids"
            )
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
        """Wait for the whole answer. A cancelled request returns the tokens that it has.

        Args:
          timeout: seconds to wait; by default without limit.

        Raises:
          TimeoutError: the request takes longer. It continues.
          ValueError: `timeout` is not a number.
          Exception: the error that ended the request.
        """
        self._runner.wait(self._call, timeout=timeout)
        self._raise_error()
        return GenerateResult.of(self._rows, self._timer, with_text=self._with_text)

    def cancel(self) -> None:
        """End the request now. Its tokens so far remain available."""
        self._runner.cancel(self._call)

    def _raise_error(self) -> None:
        for row in self._rows:
            if row.error is not None:
                # Each `raise` adds the frames of its callers to the traceback of an exception.
                if self._traceback is None:
                    self._traceback = row.error.__traceback__
                raise row.error.with_traceback(self._traceback)
