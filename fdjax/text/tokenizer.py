"""Text to token ids and back, with the tokenizers package and a checkpoint's tokenizer.json.

The methods have the names and the meaning that they have in transformers.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fdjax.models import CheckpointError
from fdjax.text.chat_template import ChatTemplate, Message
from fdjax.text.tokenizer_files import TokenizerFiles
from fdjax.text.tokenizer_limits import is_failure
from fdjax.weights.stored import is_there

_ROWS = list | tuple | np.ndarray | jax.Array


class MissingTokenizerError(CheckpointError):
    """A call needs a tokenizer, but the checkpoint has no tokenizer.json."""


class Encoding(dict[str, Any]):
    """The result of calling a tokenizer: a dict with its entries as attributes."""

    @property
    def input_ids(self) -> Any:
        """The token ids of a text, or one list of ids per text."""
        return self["input_ids"]

    @property
    def attention_mask(self) -> Any:
        """A 1 for each id, because nothing is padded."""
        return self["attention_mask"]


class Tokenizer:
    """The tokenizer of a checkpoint. It is false if the checkpoint has none.

    The folder is read once. Later changes of its files have no effect.

    Attributes:
      folder: folder of the checkpoint, or None.
      chat_template: the checkpoint's chat templates; false if it has none.
      special_tokens: texts of the special tokens by role, such as "eos_token".

    Raises:
      CheckpointError: tokenizer.json, or a file with tokens or chat templates, is damaged.
    """

    def __init__(self, folder: Path | None = None):
        self.folder = folder
        self.chat_template = ChatTemplate({})
        self.special_tokens: dict[str, str] = {}
        self._tokenizer = None
        if folder is None:
            return
        files = TokenizerFiles.read(folder)
        self.special_tokens = files.texts()
        self.chat_template = ChatTemplate.from_folder(folder, files)
        if is_there(path := folder / "tokenizer.json"):
            # Models without a tokenizer do not need the package tokenizers.
            from fdjax.text.backend import build

            self._tokenizer = build(path, files)
            added = self._tokenizer.get_added_tokens_decoder()
            special = {token.content for token in added.values() if token.special}
            # The entry of a token that a normalizer changes is not its text. Such a token is shown.
            self._special = frozenset(i for i in added if self.token(i) in special)

    def __bool__(self) -> bool:
        return self._tokenizer is not None

    def __len__(self) -> int:
        """The number of token ids, added tokens included."""
        return self._required().get_vocab_size(with_added_tokens=True)

    def __repr__(self) -> str:
        if not self:
            return f"Tokenizer(folder={self._folder_name}, no tokenizer.json)"
        tokens = "".join(f", {name}={text!r}" for name, text in self.special_tokens.items())
        template = "" if self.chat_template else ", no chat template"
        return f"Tokenizer(folder={self._folder_name}, {len(self)} tokens{tokens}{template})"

    def __call__(self, text: str | Sequence[str], *, add_special_tokens: bool = True) -> Encoding:
        """Encode a text or several, like `encode`, and return ids and attention mask as lists."""
        ids = self.encode(text, add_special_tokens=add_special_tokens)
        mask = [1] * len(ids) if isinstance(text, str) else [[1] * len(row) for row in ids]
        return Encoding(input_ids=ids, attention_mask=mask)

    def encode(
        self, text: str | Sequence[str], *, add_special_tokens: bool = True
    ) -> list[int] | list[list[int]]:
        """Encode a text as token ids, or several texts as one list of ids per text.

        Args:
          text: a text, or a list of texts.
          add_special_tokens: whether to add the special tokens that belong to every text.

        Raises:
          MissingTokenizerError: the checkpoint has no tokenizer.json.
          ValueError: it is not a text, or contains lone surrogates, which UTF-8 cannot encode.
          CheckpointError: tokenizer.json fails on this text.
        """
        tokenizer = self._required()
        if isinstance(text, list | tuple):
            return [self.encode(one, add_special_tokens=add_special_tokens) for one in text]
        if not isinstance(text, str):
            raise ValueError(f"encode: text must be a text or a list of texts, got {text!r:.80}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"encode: not valid text ({error.reason})") from None
        encode = tokenizer.encode
        return self._run(lambda: encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Any, *, skip_special_tokens: bool = True) -> str | list[str]:
        """Decode token ids as a text, or several lists of ids as a list of texts.

        Args:
          ids: an id, a sequence or an array of ids, or a list of sequences.
          skip_special_tokens: whether to leave out special tokens, as in the texts of results. The
            default of transformers is False.

        Raises:
          MissingTokenizerError: the checkpoint has no tokenizer.json.
          ValueError: the argument does not consist of ids.
          CheckpointError: tokenizer.json fails on these ids.
        """
        decode = self._required().decode
        ids = ids.tolist() if hasattr(ids, "tolist") else ids
        if isinstance(ids, int):
            ids = [ids]
        elif isinstance(ids, Sequence) and ids and isinstance(ids[0], _ROWS):
            return [self.decode(row, skip_special_tokens=skip_special_tokens) for row in ids]
        try:
            return self._run(lambda: decode(list(ids), skip_special_tokens=skip_special_tokens))
        except (OverflowError, TypeError):
            raise ValueError(f"decode: ids must be integers from 0, got {ids!r:.80}") from None

    def apply_chat_template(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        *,
        tokenize: bool = True,
        return_dict: bool = True,
        **template_options: Any,
    ) -> Any:
        """Render a conversation as a prompt, or several conversations as a list of prompts.

        Args:
          messages: see `ChatTemplate.render`.
          tokenize: return token ids. If False, return the text that the template renders.
          return_dict: return the ids as an `Encoding`. If False, return a list of ids.
          **template_options: options of `ChatTemplate.render`, such as `add_generation_prompt`.

        Raises:
          ValueError: there is no template, or it refuses these messages.
          MissingTokenizerError: `tokenize` is True, but there is no tokenizer.json.
        """
        several = isinstance(messages, list | tuple) and messages
        if several and isinstance(messages[0], list | tuple):
            text = [self.chat_template.render(one, **template_options) for one in messages]
        else:
            text = self.chat_template.render(messages, **template_options)
        if not tokenize:
            return text
        encoding = self(text, add_special_tokens=False)
        return encoding if return_dict else encoding.input_ids

    def token(self, token_id: int) -> str | None:
        """The vocabulary entry of an id, or None if there is no such id."""
        return self._required().id_to_token(token_id)

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary without added tokens; `len` includes them."""
        return self._required().get_vocab_size(with_added_tokens=False)

    @property
    def bos_token_id(self) -> int | None:
        """Id of the token that begins a text; None if the checkpoint names none."""
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Id of the token that ends a text, or a turn in a chat; None if none is named."""
        return self._named_id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        """Id of the token used for padding; None if the checkpoint names none."""
        return self._named_id("pad_token")

    def is_silent(self, token_id: int) -> bool:
        """Whether `decode` leaves an id out: a special token, or one that does not exist."""
        return self.token(token_id) is None or token_id in self._special

    @property
    def _folder_name(self) -> str | None:
        return None if self.folder is None else repr(str(self.folder))

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._required().token_to_id(token)

    def _run(self, call: Callable[[], Any]) -> Any:
        """Call the tokenizers package. Its panics are not `Exception`s and need extra care."""
        try:
            return call()
        except BaseException as error:
            if not is_failure(error):
                raise
            raise CheckpointError(
                f"{self.folder / 'tokenizer.json'}: the tokenizer fails on this input ({error})"
            ) from None

    def _required(self):
        if self._tokenizer is None:
            hint = "texts, chats, streams and stop strings need one; token ids do not"
            for name in ("tokenizer.model", "vocab.json"):
                if self.folder is not None and (self.folder / name).exists():
                    hint = (
                        f"{name} alone is not enough: convert it with transformers, "
                        "AutoTokenizer.from_pretrained(folder).save_pretrained(folder), "
                        "or pass token ids"
                    )
                    break
            where = "this model" if self.folder is None else self.folder
            raise MissingTokenizerError(f"{where}: no tokenizer.json; {hint}")
        return self._tokenizer


class Detokenizer:
    """Decodes a growing sequence piece by piece. The joined pieces equal `decode` of all ids.

    Text that may still change is held back: an incomplete character, or a run of byte tokens, which
    decoders interpret as a whole. Each `push` decodes only a window of the last ids, so its cost
    does not depend on the length of the sequence.
    """

    # Largest number of ids in a window, and the number of ids kept when it moves on.
    _LONGEST = 32
    _CONTEXT = 4

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._sent = ""

    def push(self, ids: Sequence[int], *, last: bool = False) -> str:
        """Append ids and return the new text that cannot change any more.

        Args:
          ids: the next token ids of the sequence.
          last: whether the sequence ends here, so that all remaining text is returned.
        """
        # Silent ids are dropped, so that they do not split a run of byte tokens.
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
        """The text that is held back. `push([], last=True)` would return it."""
        text = self._decode(self._ids)
        return text[len(self._sent) :] if text.startswith(self._sent) else ""

    def _move_on(self, settled: int) -> None:
        """Drop the front of the window if that does not change the text of the rest."""
        for start in range(settled - self._CONTEXT, settled - 2 * self._CONTEXT, -1):
            text = self._decode(self._ids[start:settled])
            # The rest must have some text. Otherwise a decoder that strips the beginning of a text
            # would strip the next text.
            if text and self._sent.endswith(text):
                del self._ids[:start]
                self._sent = text
                return

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids) if ids else ""

    def _open_byte(self, token_id: int) -> bool:
        token = self._tokenizer.token(token_id) or ""
        return len(token) == 6 and token.startswith("<0x") and token.endswith(">")
