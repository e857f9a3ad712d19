"""Text to ids and back as transformers does it, and text of a sequence while it grows."""

import functools
import json
import random
import shutil
from pathlib import Path

import pytest

from fdjax.models import CheckpointError
from fdjax.text.tokenizer import Detokenizer, MissingTokenizerError, Tokenizer

FIXTURES = Path(__file__).parents[1] / "fixtures" / "hf"
CASES = ("llama3_gqa_tied", "llama2_mha")  # byte-level, and byte fallback
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
SAMPLES = [
    "The largest ocean is the Pacific Ocean.",
    "naïve café — “quoted” … 100 €",
    "日本語のテキスト と 한국어 и кириллица",
    "👩\u200d👩\u200d👧 family, 🦙🏽 and 🏴\U000e0067\U000e0062\U000e007f flags",
    "नमस्ते दुनिया, สวัสดี, مرحبا بالعالم",
    "tabs\tand\r\nnew\n\nlines  and   spaces ",
    "\x00\x7f\u0080\u07ff\u0800\uffff\U00010000\U0010ffff",
    f"a real {REPLACEMENT} in the text, and at its end {REPLACEMENT}{REPLACEMENT}",
    "e\u0301 combines, \ufeff marks",
]


@functools.cache
def tokenizer(case: str) -> Tokenizer:
    return Tokenizer(FIXTURES / case)


@functools.cache
def expected(case: str) -> dict:
    return json.loads((FIXTURES / case / "tokenizer_expected.json").read_text())


def byte_id(case: str, byte: int) -> int:
    """The id of a token that is one byte."""
    if case == "llama2_mha":
        return tokenizer(case)._tokenizer.token_to_id(f"<0x{byte:02X}>")
    return byte_level_ids()[byte]


@functools.cache
def byte_level_ids() -> dict[int, int]:
    """GPT-2's bytes: printable ones stand for themselves, the others for code points from 256."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in shown]
    names = {b: chr(b) for b in shown} | {b: chr(256 + i) for i, b in enumerate(hidden)}
    find = tokenizer("llama3_gqa_tied")._tokenizer.token_to_id
    return {byte: find(name) for byte, name in names.items()}


def special_ids(case: str) -> list[int]:
    added = json.loads((FIXTURES / case / "tokenizer.json").read_text())["added_tokens"]
    return [token["id"] for token in added]


def pushes(case: str, ids: list[int], rng: random.Random) -> list[str]:
    """The pieces of a sequence cut at random, empty pushes among them."""
    detokenizer = Detokenizer(tokenizer(case))
    pieces, start = [], 0
    while start < len(ids):
        step = rng.choice((0, 1, 1, 1, 2, 3, 8))
        pieces.append(detokenizer.push(ids[start : start + step]))
        start += step
    pieces.append(detokenizer.push([], last=True))
    return pieces


def assert_settled(case: str, ids: list[int], rng: random.Random) -> None:
    """The pieces joined are the whole: nothing was sent that later ids changed, nothing lost.

    So a replacement character in a piece, what a partial character would show as, is one that the
    final text has in that place.
    """
    whole = tokenizer(case).decode(ids)
    pieces = pushes(case, ids, rng)
    assert "".join(pieces) == whole, (ids, pieces)
    # A piece given before the end may change no more, so it ends in a character that is whole.
    sent = ""
    for piece in pieces[:-1]:
        sent += piece
        assert not piece.endswith(REPLACEMENT), (ids, pieces)
        assert whole.startswith(sent)


@pytest.mark.parametrize("case", CASES)
def test_text_and_ids_are_those_of_transformers(case):
    texts = expected(case)["texts"]
    assert len(texts) >= 11
    for entry in texts:
        assert tokenizer(case).encode(entry["text"]) == entry["ids"]
        assert tokenizer(case).decode(entry["ids"]) == entry["decoded"]
        assert tokenizer(case).decode(entry["ids_without_special"]) == entry["decoded"]


@pytest.mark.parametrize("case", CASES)
def test_decode_leaves_special_tokens_out(case):
    plain = expected(case)["texts"][2]
    for special in special_ids(case):
        assert tokenizer(case).is_silent(special)
        mixed = [special, *plain["ids_without_special"], special]
        assert tokenizer(case).decode(mixed) == plain["text"]
    assert tokenizer(case).is_silent(10**6)
    assert not any(map(tokenizer(case).is_silent, plain["ids_without_special"]))
    assert tokenizer(case).decode([]) == ""


def test_token_is_the_vocabulary_entry():
    assert tokenizer("llama2_mha").token(1) == "<s>"
    assert tokenizer("llama3_gqa_tied").token(315) == "<|begin_of_text|>"
    assert tokenizer("llama2_mha").token(10**6) is None


def test_a_tokenizer_file_neither_truncates_nor_pads(tmp_path):
    data = json.loads((FIXTURES / "llama3_gqa_tied/tokenizer.json").read_text())
    data["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    data["padding"] = {
        "strategy": {"Fixed": 128},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "!",
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    for entry in expected("llama3_gqa_tied")["texts"]:
        assert Tokenizer(tmp_path).encode(entry["text"]) == entry["ids"]


# --- without a tokenizer


def test_without_a_tokenizer_ids_are_all_there_is(tmp_path):
    nothing = Tokenizer(tmp_path)
    assert not nothing
    assert tokenizer("llama2_mha")
    for use in (lambda: nothing.encode("a"), lambda: nothing.decode([1]), lambda: nothing.token(1)):
        with pytest.raises(MissingTokenizerError) as caught:
            use()
        assert str(caught.value) == f"{tmp_path}: no tokenizer.json; pass token ids instead"
    assert issubclass(MissingTokenizerError, CheckpointError)


def test_a_sentencepiece_model_alone_says_how_to_convert_it(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"sentencepiece")
    assert not Tokenizer(tmp_path)
    with pytest.raises(MissingTokenizerError) as caught:
        Tokenizer(tmp_path).encode("text")
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}: no tokenizer.json; tokenizer.model alone is not enough")
    assert "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)" in message
    assert "pass token ids" in message
    assert "\n" not in message


def test_tokenizer_json_comes_before_tokenizer_model(tmp_path):
    shutil.copy(FIXTURES / "llama2_mha/tokenizer.json", tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"sentencepiece")
    assert Tokenizer(tmp_path).encode("") == [1]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff\xfe", b"null"], ids=repr)
def test_a_damaged_tokenizer_json(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        Tokenizer(tmp_path)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'tokenizer.json'}: not a tokenizer (")
    assert "\n" not in message


# --- growing text


@pytest.mark.parametrize("case", CASES)
def test_text_grows_as_it_will_end(case):
    rng = random.Random(0)
    texts = [entry["text"] for entry in expected(case)["texts"]]
    for text in SAMPLES + texts:
        ids = tokenizer(case).encode(text)
        for _ in range(10):
            assert_settled(case, ids, rng)


def random_ids(case: str, rng: random.Random) -> list[int]:
    """Text, cut bytes, bytes that are no UTF-8, special ids and ids past the vocabulary."""
    vocabulary = tokenizer(case)._tokenizer.get_vocab_size()
    ids = []
    for _ in range(rng.randrange(1, 7)):
        kind = rng.randrange(7)
        if kind == 0:
            ids += [rng.randrange(vocabulary) for _ in range(rng.randrange(1, 8))]
        elif kind == 1:
            ids += tokenizer(case).encode(rng.choice(SAMPLES))
        elif kind == 2:
            content = rng.choice(SAMPLES).encode()
            start = rng.randrange(len(content))
            piece = content[start : start + rng.randrange(1, 12)]
            ids += [byte_id(case, byte) for byte in piece]
        elif kind == 3:
            starts = (0x80, 0xBF, 0xC0, 0xC3, 0xE2, 0xED, 0xF0, 0xF4, 0xF8, 0xFF)
            ids += [byte_id(case, rng.choice(starts)) for _ in range(rng.randrange(1, 6))]
        elif kind == 4:
            # A surrogate half, an overlong slash, the first of five bytes.
            content = rng.choice((b"\xed\xa0\x80", b"\xc0\xaf", b"\xf8\x88", b"\xef\xbf\xbd"))
            ids += [byte_id(case, byte) for byte in content]
        elif kind == 5:
            ids.append(rng.choice(special_ids(case)))
        else:
            ids.append(rng.choice((vocabulary, vocabulary + 7, 10**6)))
    return ids


@pytest.mark.parametrize("case", CASES)
def test_text_of_a_thousand_random_sequences_grows_as_it_will_end(case):
    rng = random.Random(1)
    invalid = 0
    for _ in range(1000):
        ids = random_ids(case, rng)
        invalid += REPLACEMENT in tokenizer(case).decode(ids)
        assert_settled(case, ids, rng)
    # The cases are not tame.
    assert 300 < invalid < 950


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("apart", ["special", "nonexistent"])
def test_a_silent_id_does_not_part_the_bytes_around_it(case, apart):
    """Decoding skips the id, so the bytes before it and behind it are one run."""
    silent = special_ids(case)[-1] if apart == "special" else 10**6
    first, *rest = (byte_id(case, byte) for byte in "€".encode())
    for ids in ([first, silent, *rest], [byte_id(case, 0x41), silent, byte_id(case, 0xE2)]):
        assert_settled(case, ids, random.Random(0))
        detokenizer = Detokenizer(tokenizer(case))
        pieces = [detokenizer.push([i]) for i in ids] + [detokenizer.push([], last=True)]
        assert "".join(pieces) == tokenizer(case).decode(ids)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("character", ["é", "€", "🦙"])
def test_a_character_comes_in_one_piece(case, character):
    detokenizer = Detokenizer(tokenizer(case))
    *first, final = [byte_id(case, byte) for byte in character.encode()]
    ordinary = tokenizer(case).encode("abc")[1:]
    assert [detokenizer.push([i]) for i in first] == [""] * len(first)
    text = detokenizer.push([final]) + detokenizer.push(ordinary)
    assert text == tokenizer(case).decode([*first, final, *ordinary])
    assert text.startswith(character)


@pytest.mark.parametrize("case", CASES)
def test_ordinary_text_is_not_held_back(case):
    ids = tokenizer(case).encode("The largest ocean")
    detokenizer = Detokenizer(tokenizer(case))
    for n, token in enumerate(ids, 1):
        detokenizer.push([token])
        assert detokenizer._sent == tokenizer(case).decode(ids[:n])
    assert detokenizer.push([], last=True) == ""


@pytest.mark.parametrize("case", CASES)
def test_an_incomplete_character_comes_out_at_the_end(case):
    detokenizer = Detokenizer(tokenizer(case))
    assert detokenizer.push([byte_id(case, 0xE2), byte_id(case, 0x82)]) == ""
    assert set(detokenizer.push([], last=True)) == {REPLACEMENT}


@pytest.mark.parametrize("case", CASES)
def test_no_ids_have_no_text(case):
    detokenizer = Detokenizer(tokenizer(case))
    assert detokenizer.push([]) == ""
    assert detokenizer.push([], last=True) == ""
