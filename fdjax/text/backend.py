"""Builds the `tokenizers.Tokenizer` of a checkpoint as transformers' AutoTokenizer does.

Some classes of transformers take only the vocabulary and the merges from tokenizer.json and put
their own pipeline around them. The others use the whole file.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from fdjax.models import CheckpointError
from fdjax.text.tokenizer_files import StoredToken, TokenizerFiles
from fdjax.text.tokenizer_limits import check_tokenizer, is_failure
from fdjax.weights.stored import refuse_pointer

_QWEN_2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


def build(path: Path, files: TokenizerFiles) -> tokenizers.Tokenizer:
    """Build a tokenizer.

    Args:
      path: tokenizer.json.
      files: the content of the files beside it.

    Raises:
      CheckpointError: tokenizer.json is damaged or unreadable, or a token in another file is.
    """
    try:
        refuse_pointer(path)
        # `from_file` refuses a path that is not UTF-8.
        stored = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    except CheckpointError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_failure(error):
            raise
        raise CheckpointError(f"{path}: not a tokenizer ({error})") from None
    check_tokenizer(stored, path)
    tokenizer, pipeline = stored, _PIPELINES.get(files.kind)
    config = path.with_name("tokenizer_config.json")
    try:
        if pipeline is not None and isinstance(stored.model, models.BPE):
            tokenizer = pipeline(stored.model, files)
            tokenizer.post_processor = stored.post_processor
        _add_tokens(tokenizer, stored, files)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{config}: a token cannot be added ({error})") from None
    if files.kind == "CodeLlamaTokenizer" and tokenizer is not stored:
        bos = files.texts().get("bos_token")
        if not bos:
            raise CheckpointError(f"{config}: a {files.kind} needs a bos_token, got {bos!r}")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos}:0 $A:0", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    if files.kind == "GPTNeoXTokenizer" and tokenizer is not stored:
        # This class ignores the post-processor of the file.
        tokenizer.post_processor = processors.TemplateProcessing(single="$A:0")
    tokenizer.encode_special_tokens = bool(files.options.get("split_special_tokens"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _add_tokens(
    tokenizer: tokenizers.Tokenizer, stored: tokenizers.Tokenizer, files: TokenizerFiles
) -> None:
    """Add the tokens that the tokenizer lacks, and mark those with a role as special."""
    added = {i: _added_token(token) for i, token in files.added.items()}
    if files.keeps_added:
        added |= stored.get_added_tokens_decoder()
    by_text = {token.content: token for token in added.values()}
    named = [by_text.get(text, files.named[name]) for name, text in files.texts().items()]
    present = tokenizer.get_added_tokens_decoder()
    tokens = [added[i] for i in sorted(added)]
    texts = {token.content for token in (*present.values(), *tokens)}
    further = [_added_token(token, special=True) for token in (*named, *files.extra)]
    tokens += [token for token in further if token.content not in texts]
    for token in tokens:
        token.special = token.special or token.content in files.texts().values()
    tokenizer.add_tokens(tokens)
    if files.kind == "Qwen2Tokenizer" and tokenizer is not stored:
        tokenizer.add_tokens([AddedToken(token.content, special=True) for token in further])
    if files.kind == "CohereTokenizer" and tokenizer is not stored:
        tokenizer.add_special_tokens(further)


def _added_token(token: StoredToken | AddedToken, *, special: bool = False) -> AddedToken:
    if isinstance(token, AddedToken):
        return token
    if isinstance(token, str):
        return AddedToken(token, special=special)
    fields = {name: token[name] for name in _FIELDS if name in token}
    return AddedToken(**{"special": special} | fields)


def _bpe(model: models.BPE, **options: Any) -> tokenizers.Tokenizer:
    """A tokenizer with the model's vocabulary and merges, but only these of its options."""
    neutral = dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix"))
    neutral |= {"end_of_word_suffix": None, "ignore_merges": False}
    neutral |= {"fuse_unk": False, "byte_fallback": False}
    for name, value in (neutral | options).items():
        setattr(model, name, value)
    return tokenizers.Tokenizer(model)


def _llama(model: models.BPE, files: TokenizerFiles) -> tokenizers.Tokenizer:
    prefix_space = files.options.get("add_prefix_space")
    prefix_space = prefix_space is None or bool(prefix_space)
    scheme = "always" if files.options.get("legacy", False) else "first"
    return _metaspace(
        _bpe(model, fuse_unk=True, byte_fallback=True),
        scheme if prefix_space else "never",
        strip=prefix_space,
    )


def _code_llama(model: models.BPE, files: TokenizerFiles) -> tokenizers.Tokenizer:
    prefix_space = files.options.get("add_prefix_space", True)
    prefix_space = prefix_space is None or bool(prefix_space)
    tokenizer = _bpe(
        model, fuse_unk=True, byte_fallback=True, unk_token=files.texts().get("unk_token")
    )
    return _metaspace(tokenizer, "first" if prefix_space else "never", strip=True)


def _metaspace(
    tokenizer: tokenizers.Tokenizer, prepend_scheme: str, *, strip: bool
) -> tokenizers.Tokenizer:
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme, split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        + [decoders.Strip(" ", left=1)] * strip
    )
    return tokenizer


def _gemma(model: models.BPE, files: TokenizerFiles) -> tokenizers.Tokenizer:
    tokenizer = _bpe(
        model, fuse_unk=True, byte_fallback=True, unk_token=files.texts().get("unk_token")
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def _gpt_2(model: models.BPE, files: TokenizerFiles) -> tokenizers.Tokenizer:
    tokenizer = _bpe(model)
    prefix_space = bool(files.options.get("add_prefix_space"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _gpt_neox(model: models.BPE, files: TokenizerFiles) -> tokenizers.Tokenizer:
    tokenizer = _gpt_2(model, files)
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _cohere(model: models.BPE, files: TokenizerFiles) -> tokenizers.Tokenizer:
    tokenizer = _gpt_neox(model, files)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), tokenizer.pre_tokenizer]
    )
    return tokenizer


def _qwen_2(model: models.BPE, files: TokenizerFiles) -> tokenizers.Tokenizer:
    tokenizer = _bpe(model)
    prefix_space = bool(files.options.get("add_prefix_space"))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN_2_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


_PIPELINES: dict[str, Callable[[models.BPE, TokenizerFiles], tokenizers.Tokenizer]] = {
    "CodeGenTokenizer": _gpt_2,
    "CodeLlamaTokenizer": _code_llama,
    "CohereTokenizer": _cohere,
    "GPT2Tokenizer": _gpt_2,
    "GPTNeoXTokenizer": _gpt_neox,
    "GemmaTokenizer": _gemma,
    "LlamaTokenizer": _llama,
    "Qwen2Tokenizer": _qwen_2,
}
