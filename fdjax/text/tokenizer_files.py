"""Reads the files beside tokenizer.json: the tokenizer's class, its added and special tokens.

The files have the same priority as in AutoTokenizer of transformers 5.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fdjax.models import CheckpointError
from fdjax.weights.stored import is_there, read_json

# A token in a file: its text, or the fields of a `tokenizers.AddedToken`.
StoredToken = str | dict[str, Any]

AS_STORED = "TokenizersBackend"
_NAMES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
# Classes by `model_type`. Some families are missing, because their files declare the class.
_REGISTERED = {
    "cohere": "CohereTokenizer",
    "cohere2": "CohereTokenizer",
    "gemma2": "GemmaTokenizer",
    "gemma3_text": "GemmaTokenizer",
    "glm": AS_STORED,
    "glm4": AS_STORED,
    "gpt2": "GPT2Tokenizer",
    "gpt_neox": "GPTNeoXTokenizer",
    "gptj": "GPT2Tokenizer",
    "granite": AS_STORED,
    "granitemoe": AS_STORED,
    "ministral": AS_STORED,
    "mistral": AS_STORED,
    "mixtral": AS_STORED,
    "olmo2": AS_STORED,
    "olmo3": AS_STORED,
    "olmoe": "GPTNeoXTokenizer",
    "opt": "GPT2Tokenizer",
    "phi": "GPT2Tokenizer",
    "phi3": AS_STORED,
    "qwen2": "Qwen2Tokenizer",
    "qwen2_moe": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "qwen3_moe": "Qwen2Tokenizer",
    "starcoder2": "GPT2Tokenizer",
}
_LLAMA = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
_END_OF_TEXT = "<|endoftext|>"
_GPT_2 = dict.fromkeys(("unk_token", "bos_token", "eos_token"), _END_OF_TEXT)
# Special tokens of a class, unless the files name others.
_DEFAULTS = {
    "CodeGenTokenizer": _GPT_2,
    "CohereTokenizer": {
        "unk_token": "<UNK>",
        "bos_token": "<BOS_TOKEN>",
        "eos_token": "<|END_OF_TURN_TOKEN|>",
        "pad_token": "<PAD>",
        "cls_token": "<CLS>",
        "sep_token": "<SEP>",
        "mask_token": "<MASK_TOKEN>",
    },
    "LlamaTokenizer": _LLAMA,
    "CodeLlamaTokenizer": _LLAMA
    | {f"{name}_token": f"▁<{name[:3].upper()}>" for name in ("prefix", "middle", "suffix")}
    | {"eot_token": "▁<EOT>", "fill_token": "<FILL_ME>"},
    "GemmaTokenizer": {
        f"{name}_token": f"<{name}>" for name in ("unk", "bos", "eos", "pad", "mask")
    },
    "GPT2Tokenizer": _GPT_2,
    "GPTNeoXTokenizer": _GPT_2 | {"pad_token": "<|padding|>"},
    "Qwen2Tokenizer": dict.fromkeys(("unk_token", "eos_token", "pad_token"), _END_OF_TEXT),
}


@dataclasses.dataclass(frozen=True)
class TokenizerFiles:
    """The content of the files beside tokenizer.json.

    Attributes:
      kind: name of transformers' class; `AS_STORED` means that the whole tokenizer.json is used.
      named: special tokens by role, such as "eos_token".
      extra: special tokens without a role.
      added: tokens to add, by id.
      keeps_added: whether the added tokens of tokenizer.json are used as well.
      options: the content of tokenizer_config.json.
    """

    kind: str
    named: Mapping[str, StoredToken]
    extra: tuple[StoredToken, ...]
    added: Mapping[int, StoredToken]
    keeps_added: bool
    options: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> "TokenizerFiles":
        """Read config.json, tokenizer_config.json and two older files. All of them may be missing.

        The older files, special_tokens_map.json and added_tokens.json, count only if
        tokenizer_config.json has no `added_tokens_decoder`. Then special_tokens_map.json overrides
        tokenizer_config.json.

        Raises:
          CheckpointError: a file cannot be read or has a wrong form.
        """
        path = folder / "tokenizer_config.json"
        older_path, added_path = folder / "special_tokens_map.json", folder / "added_tokens.json"
        options = read_json(path, required=False)
        older, added = {}, options.get("added_tokens_decoder")
        keeps_added = "added_tokens_decoder" not in options
        if keeps_added:
            older = read_json(older_path, required=False)
        kind = _kind(folder, options)
        extra = options.get("extra_special_tokens") or options.get("additional_special_tokens")
        extra = _expect(extra or [], list | dict, "extra_special_tokens", path)
        specific = _others(older) | _others(options) | (extra if isinstance(extra, dict) else {})
        if isinstance(extra, dict):
            # These have roles, so the list of others may have its older name beside them.
            name = "additional_special_tokens"
            extra = [] if older.keys() & {"extra_special_tokens", name} else options.get(name)
            extra = _expect(extra or [], list, name, path)
        if not extra or "extra_special_tokens" in older:
            more = older.get("extra_special_tokens") or older.get("additional_special_tokens") or []
            more = _expect(more, list, "extra_special_tokens", older_path)
            extra = [*extra, *(token for token in more if token not in extra)]
        given = {
            name: source[name] for source in (options, older) for name in _NAMES if name in source
        }
        for name, token in [*given.items(), *((f"token {t!r}", t) for t in extra)]:
            if token is not None:
                _expect(text_of(token), str, name, path)
        if keeps_added:
            special = {text_of(token) for token in [*given.values(), *extra] if token}
            ids = read_json(added_path, required=False)
            for text, i in ids.items():
                _expect(i, int, text, added_path)
            added = {
                i: {"content": text, "special": text in special, "normalized": text not in special}
                for text, i in ids.items()
            }
        named = _DEFAULTS.get(kind, {}) | given | specific
        for name, token in named.items():
            if token is not None:
                _expect(text_of(token), str, name, path)
        return cls(
            kind=kind,
            named={
                name: named[name]
                for name in dict.fromkeys((*_NAMES, *named))
                if named.get(name) is not None
            },
            extra=tuple(extra),
            added=_by_id(added, path if not keeps_added else added_path),
            keeps_added=keeps_added,
            options=options,
        )

    def texts(self) -> dict[str, str]:
        """The texts of the special tokens, by role."""
        return {name: text_of(token) for name, token in self.named.items()}


def text_of(token: Any) -> Any:
    """The text of a `StoredToken`."""
    return token.get("content") if isinstance(token, dict) else token


def _kind(folder: Path, options: Mapping[str, Any]) -> str:
    """The name of the class that AutoTokenizer chooses.

    Llama's class has no byte-level tokens, so a byte-level tokenizer.json is used as a whole.
    """
    config = read_json(folder / "config.json", required=False)
    model_type = config.get("model_type")
    registered = _REGISTERED.get(model_type) if isinstance(model_type, str) else None
    declared = options.get("tokenizer_class") or config.get("tokenizer_class")
    declared = declared.removesuffix("Fast") if isinstance(declared, str) else None
    if registered == AS_STORED:
        return AS_STORED
    if model_type == "qwen2" or declared is None:
        return registered or AS_STORED
    if declared == "LlamaTokenizer" and _is_byte_level(folder / "tokenizer.json"):
        return AS_STORED
    return declared


def _is_byte_level(path: Path) -> bool:
    try:
        return is_there(path) and b'"ByteLevel"' in path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None


def _others(data: Mapping[str, Any]) -> dict[str, StoredToken]:
    """Special tokens with roles that only this model has, such as "image_token"."""
    return {
        name: token
        for name, token in data.items()
        if name.endswith("_token") and name not in _NAMES and isinstance(text_of(token), str)
    }


def _by_id(added: Any, path: Path) -> dict[int, StoredToken]:
    try:
        by_id = {int(i): token for i, token in added.items()}
    except (AttributeError, TypeError, ValueError):
        raise CheckpointError(f"{path}: the added tokens must be a dict by id") from None
    for i, token in by_id.items():
        _expect(text_of(token), str, f"added token {i}", path)
    return by_id


def _expect(value: Any, kind: Any, name: str, path: Path) -> Any:
    if not isinstance(value, kind):
        raise CheckpointError(f"{path}: {name!r} has a value of the wrong type, {value!r:.80}")
    return value
