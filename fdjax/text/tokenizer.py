"""Text to ids and back, through the tokenizers package and a checkpoint's tokenizer.json."""

from collections.abc import Sequence
from pathlib import Path

from fdjax.models import CheckpointError
from fdjax.text.chat_template import ChatTemplate
from fdjax.weights.checkpoint import is_there, refuse_pointer


class MissingTokenizerError(CheckpointError):
    """Text was given or asked for and the checkpoint has no tokenizer.json."""


class Tokenizer:
    """A checkpoint's tokenizer, or its absence: ids work without one.

    The folder is read once: what happens to it later changes nothing.

    Attributes:
      folder: of the checkpoint, or None.
      chat_template: the checkpoint's chat templates; false when it has none.

    Raises:
      CheckpointError: tokenizer.json, or a file with chat templates, is damaged.
    """

    def __init__(self, folder: Path | None = None):
        self.folder = folder
        self.chat_template = (
            ChatTemplate({}) if folder is None else ChatTemplate.from_folder(folder)
        )
        self._tokenizer = None
        if folder is not None and is_there(path := folder / "tokenizer.json"):
            import tokenizers

            try:
                refuse_pointer(path)
                self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
            except CheckpointError:
                raise
            except Exception as error:
                raise CheckpointError(f"{path}: not a tokenizer ({error})") from None
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            added = self._tokenizer.get_added_tokens_decoder()
            self._special = frozenset(i for i, token in added.items() if token.special)

    def __bool__(self) -> bool:
        return self._tokenizer is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a prompt, with the special tokens the tokenizer adds unless declined.

        Raises:
          MissingTokenizerError: the checkpoint has no tokenizer.json.
          ValueError: the text has lone surrogates, which no encoding can write.
        """
        tokenizer = self._required()
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"encode: not valid text ({error.reason})") from None
        return tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out.

        Raises:
          MissingTokenizerError: the checkpoint has no tokenizer.json.
        """
        return self._required().decode(list(ids), skip_special_tokens=True)

    def token(self, token_id: int) -> str | None:
        """The vocabulary entry of an id."""
        return self._required().id_to_token(token_id)

    @property
    def end_of_turn(self) -> int | None:
        """Id of the `eos_token` of tokenizer_config.json, which ends a turn where models chat."""
        token = self.chat_template.special_tokens.get("eos_token")
        return None if token is None else self._required().token_to_id(token)

    def is_silent(self, token_id: int) -> bool:
        """Whether `decode` leaves an id out: a special token, or one that does not exist."""
        return self.token(token_id) is None or token_id in self._special

    def _required(self):
        if self._tokenizer is None:
            hint = "pass token ids instead"
            if self.folder is not None and (self.folder / "tokenizer.model").exists():
                hint = (
                    "tokenizer.model alone is not enough: convert it with transformers, "
                    "AutoTokenizer.from_pretrained(folder).save_pretrained(folder), "
                    "or pass token ids"
                )
            where = "this model" if self.folder is None else self.folder
            raise MissingTokenizerError(f"{where}: no tokenizer.json; {hint}")
        return self._tokenizer


class Detokenizer:
    """Text of a growing sequence: what `push` returns, joined, is `decode` of the whole.

    Text is held back while it may still change: a character whose bytes are not all there, or a
    run of byte tokens, which decoders interpret as a whole. Only a window of ids is decoded at a
    time, so a push costs the same however long the sequence is.
    """

    # Ids in a window, and how many of them it starts with when it moves on.
    _LONGEST = 32
    _CONTEXT = 4

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._sent = ""

    def push(self, ids: Sequence[int], *, last: bool = False) -> str:
        """The text that these further ids settle; with `last`, all that is left."""
        # Left out here, a silent id cannot hide that the bytes around it are one run.
        self._ids += [i for i in ids if not self._tokenizer.is_silent(i)]
        settled = len(self._ids)
        if not last:
            while settled and self._open_byte(self._ids[settled - 1]):
                settled -= 1
        text = whole = self._decode(self._ids[:settled])
        if not last:
            text = text.rstrip("\N{REPLACEMENT CHARACTER}")
        if not text.startswith(self._sent):
            return ""
        piece, self._sent = text[len(self._sent) :], text
        if settled > self._LONGEST and text == whole:
            self._move_on(settled)
        return piece

    @property
    def pending(self) -> str:
        """What `push([], last=True)` would return."""
        text = self._decode(self._ids)
        return text[len(self._sent) :] if text.startswith(self._sent) else ""

    def _move_on(self, settled: int) -> None:
        """Drop the front of the window, where that leaves the text of the rest as it is."""
        for start in range(settled - self._CONTEXT, settled - 2 * self._CONTEXT, -1):
            text = self._decode(self._ids[start:settled])
            # Without text, a decoder that strips the beginning would strip what comes next.
            if text and self._sent.endswith(text):
                del self._ids[:start]
                self._sent = text
                return

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids) if ids else ""

    def _open_byte(self, token_id: int) -> bool:
        token = self._tokenizer.token(token_id) or ""
        return len(token) == 6 and token.startswith("<0x") and token.endswith(">")
