"""Text to ids and back as in transformers, and text of a sequence while it grows."""

import functools
import json
import random
import shutil
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from fdjax.models import CheckpointError
from fdjax.text.tokenizer import Detokenizer, MissingTokenizerError, Tokenizer

FIXTURES = Path(__file__).parents[1] / "fixtures" / "hf"
CASES = ("llama3_gqa_tied", "llama2_mha")  # byte-level, and with byte fallback
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
    """The pieces of a sequence that is cut at random places, also into empty parts."""
    detokenizer = Detokenizer(tokenizer(case))
    pieces, start = [], 0
    while start < len(ids):
        step = rng.choice((0, 1, 1, 1, 2, 3, 8))
        pieces.append(detokenizer.push(ids[start : start + step]))
        start += step
    pieces.append(detokenizer.push([], last=True))
    return pieces


def assert_settled(case: str, ids: list[int], rng: random.Random) -> None:
    """The joined pieces are the whole text: no later id changed them, and nothing is lost.

    A partial character would show as a replacement character. So each replacement character in a
    piece must also be in the final text, in the same place.
    """
    whole = tokenizer(case).decode(ids)
    pieces = pushes(case, ids, rng)
    assert "".join(pieces) == whole, (ids, pieces)
    # An early piece must not change any more, so it ends with a complete character.
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
        assert str(caught.value).startswith(f"{tmp_path}: no tokenizer.json; texts, chats")
    assert issubclass(MissingTokenizerError, CheckpointError)


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json"])
def test_an_older_vocabulary_alone_says_how_to_convert_it(tmp_path, name):
    (tmp_path / name).write_bytes(b"{}")
    assert not Tokenizer(tmp_path)
    with pytest.raises(MissingTokenizerError) as caught:
        Tokenizer(tmp_path).encode("text")
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}: no tokenizer.json; {name} alone is not enough")
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


@pytest.mark.skipif(sys.platform != "linux", reason="file names must be UTF-8")
def test_a_folder_whose_name_is_not_utf8(tmp_path):
    folder = tmp_path / "\udcff"
    folder.mkdir()
    shutil.copy(FIXTURES / "llama2_mha/tokenizer.json", folder)
    assert Tokenizer(folder).encode(SAMPLES[0]) == tokenizer("llama2_mha").encode(SAMPLES[0])


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
    """Text, cut bytes, bytes that are not UTF-8, special ids and ids past the vocabulary."""
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
    # The cases are hard enough.
    assert 300 < invalid < 950


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("apart", ["special", "nonexistent"])
def test_a_silent_id_does_not_part_the_bytes_around_it(case, apart):
    """Decoding skips the id, so the bytes before and after it form one run."""
    silent = special_ids(case)[-1] if apart == "special" else 10**6
    first, *rest = (byte_id(case, byte) for byte in "€".encode())
    for ids in ([first, silent, *rest], [byte_id(case, 0x41), silent, byte_id(case, 0xE2)]):
        assert_settled(case, ids, random.Random(0))
        detokenizer = Detokenizer(tokenizer(case))
        pieces = [detokenizer.push([i]) for i in ids] + [detokenizer.push([], last=True)]
        assert "".join(pieces) == tokenizer(case).decode(ids)


def test_a_special_token_that_decode_shows_is_not_silent(tmp_path):
    """A normalizer turns the token into another text, so decoding does not know it as special."""
    tool = {"content": "<tool>", "special": True, "normalized": True}
    normalizer = {"type": "Prepend", "prepend": "▁"}
    files = {"tokenizer_config.json": {"extra_special_tokens": [tool]}}
    given = Tokenizer(write_folder(tmp_path, "llama2_mha", {"normalizer": normalizer}, files))
    ids = given.encode("<tool>", add_special_tokens=False)
    assert len(ids) == 1 and given.decode(ids) == "<tool>"
    assert not given.is_silent(ids[0])
    detokenizer = Detokenizer(given)
    assert detokenizer.push(ids) + detokenizer.push([], last=True) == "<tool>"


def test_special_tokens_with_and_without_a_role_are_added(tmp_path):
    """As in transformers: a dict names some, and the list with the older name has the others."""
    names = {"image_token": "<image>"}
    options = {"extra_special_tokens": names, "additional_special_tokens": ["<tool>"]}
    files = {"tokenizer_config.json": options}
    given = Tokenizer(write_folder(tmp_path, "llama2_mha", {}, files))
    assert len(given.encode("<image><tool>", add_special_tokens=False)) == 2
    assert given.special_tokens["image_token"] == "<image>"
    # An older file replaces the list.
    files["special_tokens_map.json"] = {"additional_special_tokens": ["<other>"]}
    given = Tokenizer(write_folder(tmp_path, "llama2_mha", {}, files))
    assert len(given.encode("<image><other>", add_special_tokens=False)) == 2
    assert len(given.encode("<tool>", add_special_tokens=False)) > 1


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


# --- the small files beside tokenizer.json

BESIDE = json.loads((FIXTURES / "tokenizers.json").read_text(encoding="utf-8"))["cases"]


def write_folder(folder: Path, base: str, fields: dict, files: dict) -> Path:
    """A committed tokenizer.json with some fields replaced, and with other files beside it."""
    stored = json.loads((FIXTURES / base / "tokenizer.json").read_text(encoding="utf-8"))
    for name, data in {"tokenizer.json": stored | fields, **files}.items():
        (folder / name).write_text(json.dumps(data), encoding="utf-8")
    return folder


@pytest.mark.parametrize("case", BESIDE.values(), ids=BESIDE.keys())
def test_files_beside_tokenizer_json_mean_what_they_mean_in_transformers(tmp_path, case):
    given = Tokenizer(write_folder(tmp_path, case["base"], case["fields"], case["files"]))
    for entry in case["texts"]:
        ids = given.encode(entry["text"])
        assert ids == entry["ids"], entry["text"]
        assert given.encode(entry["text"], add_special_tokens=False) == entry["bare"]
        assert given.decode(ids, skip_special_tokens=False) == entry["whole"]
        assert given.decode(ids) == entry["decoded"]
        assert given.decode(ids[len(ids) // 2 :]) == entry["half"]
    assert (given.vocab_size, len(given)) == (case["vocab_size"], case["length"])
    assert given.special_tokens == case["special_tokens"]
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(given, name) == case["ids"][name]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"eos_token": 5}, "'eos_token' has a value of the wrong type, 5"),
        ({"eos_token": {"text": "a"}}, "'eos_token' has a value of the wrong type"),
        ({"extra_special_tokens": 3}, "'extra_special_tokens' has a value of the wrong type, 3"),
        ({"extra_special_tokens": [[]]}, "has a value of the wrong type"),
        ({"added_tokens_decoder": {"a": "b"}}, "the added tokens must be a dict by id"),
        ({"added_tokens_decoder": 5}, "the added tokens must be a dict by id"),
        ({"added_tokens_decoder": {"400": 7}}, "'added token 400' has a value of the wrong"),
        ({"added_tokens_decoder": {"400": {"content": "a", "lstrip": "b"}}}, "cannot be added"),
        ({"bos_token": [None]}, "'bos_token' has a value of the wrong type"),
        (
            {"tokenizer_class": "CodeLlamaTokenizer", "bos_token": None},
            "needs a bos_token, got None",
        ),
        ({"tokenizer_class": "CodeLlamaTokenizer", "bos_token": ""}, "needs a bos_token, got ''"),
        ({"tokenizer_class": "GemmaTokenizer", "unk_token": "\ud800"}, "cannot be added"),
    ],
    ids=repr,
)
def test_a_damaged_tokenizer_config_is_named(tmp_path, files, message):
    write_folder(tmp_path, "llama2_mha", {}, {"tokenizer_config.json": files})
    with pytest.raises(CheckpointError) as caught:
        Tokenizer(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'tokenizer_config.json'}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_damaged_id_of_an_added_token_is_named(tmp_path):
    write_folder(tmp_path, "llama2_mha", {}, {"added_tokens.json": {"x": []}})
    with pytest.raises(CheckpointError, match=r"added_tokens\.json: 'x' has a value of the wrong"):
        Tokenizer(tmp_path)


def test_a_panic_while_a_tokenizer_is_read_is_the_files_fault(tmp_path):
    broken = {"type": "Precompiled", "precompiled_charsmap": "/////w=="}
    write_folder(tmp_path, "llama2_mha", {"normalizer": broken}, {})
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer \(Precompiled"):
        Tokenizer(tmp_path)


def test_a_post_processor_with_an_absent_token_is_refused_at_load(tmp_path):
    stored = json.loads((FIXTURES / "llama2_mha/tokenizer.json").read_text())
    lacking = stored["post_processor"] | {"special_tokens": {}}
    for processor in (lacking, {"type": "Sequence", "processors": [lacking]}):
        write_folder(tmp_path, "llama2_mha", {"post_processor": processor}, {})
        with pytest.raises(
            CheckpointError, match=r"tokenizer\.json: the post-processor adds '<s>'"
        ):
            Tokenizer(tmp_path)


def test_a_normaliser_that_grows_a_text_without_bound_is_refused_at_load(tmp_path):
    grow = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 40}
    write_folder(tmp_path, "llama2_mha", {"normalizer": grow}, {})
    assert len(Tokenizer(tmp_path).encode("a")) == 41
    several = {"type": "Sequence", "normalizers": [grow] * 3}
    write_folder(tmp_path, "llama2_mha", {"normalizer": several}, {})
    with pytest.raises(CheckpointError, match=r"the normalizer can make a text 6\.4e\+04 times"):
        Tokenizer(tmp_path)
    empty = {"type": "Replace", "pattern": {"Regex": ""}, "content": "a" * 2000}
    write_folder(tmp_path, "llama2_mha", {"decoder": empty}, {})
    with pytest.raises(CheckpointError, match=r"the decoder can make a text 2e\+03 times"):
        Tokenizer(tmp_path)


def test_a_regex_that_explodes_is_the_files_fault(tmp_path):
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated"}
    write_folder(tmp_path, "llama2_mha", {"pre_tokenizer": split | {"invert": False}}, {})
    given = Tokenizer(tmp_path)
    assert given.encode("aaa")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: .* fails on this input") as caught:
        given.encode("a" * 2000 + "b")
    assert "\n" not in str(caught.value)


# --- the object


def test_several_texts_are_a_list():
    given = tokenizer("llama3_gqa_tied")
    first, second = given.encode("a b"), given.encode("c")
    assert given.encode(["a b", "c"]) == [first, second]
    assert given.encode([]) == []
    assert given(["a b", "c"]).input_ids == [first, second]
    assert given("a b") == {"input_ids": first, "attention_mask": [1] * len(first)}
    assert given(["a b", "c"]).attention_mask == [[1] * len(first), [1] * len(second)]
    assert given("a b", add_special_tokens=False).input_ids == first[1:]
    assert given.decode([first, second]) == ["a b", "c"]
    assert given.decode([first, second], skip_special_tokens=False)[1] == "<|begin_of_text|>c"


def test_ids_to_decode_may_be_an_array_or_one_id():
    given = tokenizer("llama3_gqa_tied")
    ids = given.encode("a b")
    assert given.decode(np.array(ids)) == given.decode(jnp.array(ids)) == "a b"
    assert given.decode([np.int32(i) for i in ids]) == "a b"
    assert given.decode(np.array([ids, ids])) == ["a b", "a b"]
    assert given.decode(ids[1]) == given.decode(np.int64(ids[1])) == given.decode([ids[1]])


@pytest.mark.parametrize("ids", [[-1], ["a"], "text", [1.5], [2**40], [1, "a"]], ids=repr)
def test_what_are_no_ids_to_decode(ids):
    with pytest.raises(ValueError, match="decode: ids must be integers"):
        tokenizer("llama2_mha").decode(ids)


@pytest.mark.parametrize("text", [5, None, b"a", [5], {"a": 1}], ids=repr)
def test_what_is_no_text_to_encode(text):
    with pytest.raises(ValueError, match="encode: text must be a text or a list of texts, got"):
        tokenizer("llama2_mha").encode(text)


def test_a_repr_says_what_it_is(tmp_path):
    shown = repr(tokenizer("llama2_mha"))
    assert shown.startswith(f"Tokenizer(folder={str(FIXTURES / 'llama2_mha')!r}, 320 tokens")
    assert ", eos_token='</s>'" in shown
    assert repr(Tokenizer(tmp_path)) == f"Tokenizer(folder={str(tmp_path)!r}, no tokenizer.json)"
    assert repr(Tokenizer()) == "Tokenizer(folder=None, no tokenizer.json)"


def test_apply_chat_template():
    given = tokenizer("llama2_mha")
    messages = [{"role": "user", "content": "Hi"}]
    text = given.apply_chat_template(messages, tokenize=False)
    assert text == "<s>[INST] Hi [/INST]"
    ids = given.apply_chat_template(messages, return_dict=False)
    assert ids == given.encode(text, add_special_tokens=False)
    assert ids.count(given.bos_token_id) == 1
    assert given.apply_chat_template(messages).input_ids == ids
    assert given.apply_chat_template([messages, messages], tokenize=False) == [text, text]
    assert given.apply_chat_template([messages] * 2, return_dict=False) == [ids, ids]
    opened = "{% if add_generation_prompt %}answer{% endif %}"
    options = {"chat_template": opened, "tokenize": False}
    assert given.apply_chat_template(messages, add_generation_prompt=True, **options) == "answer"
    assert given.apply_chat_template(messages, **options) == ""


def test_a_continuation_keeps_the_space_that_joins_it_to_its_prompt():
    """As in transformers' decode of new tokens, whose outputs are in the fixture."""
    entry = next(e for e in BESIDE["qwen3 as stored"]["texts"] if e["half"].startswith(" "))
    new_tokens = entry["ids"][len(entry["ids"]) // 2 :]
    assert tokenizer("llama3_gqa_tied").decode(new_tokens) == entry["half"]
