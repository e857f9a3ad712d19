"""The command line: its output and exit codes, and no traceback after a user's mistake."""

import codecs
import copy
import io
import json
import math
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
import types
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest

try:
    import pty
    import termios
except ImportError:  # not a Unix
    pty = None

import fdjax
from fdjax.bench import record as records
from fdjax.cli import info
from fdjax.cli.main import _parser, main
from fdjax.cli.shared import model_of
from fdjax.engine import results
from fdjax.engine.program import Program
from fdjax.pallas_kernels.dispatch import NAMES
from fdjax.system import platform
from fdjax.tools.devices import DEVICES
from fdjax.weights.checkpoint import locate

QUESTION = "What is the largest ocean?"
ANSWER = "The largest ocean is the Pacific Ocean."
COMMANDS = ("generate", "chat", "score", "info", "doctor", "bench", "calibrate", "tune")

pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.fixture(scope="module")
def lm():
    return fdjax.load("tiny", compilation_cache=False, progress=False)


@pytest.fixture
def loaded(lm, monkeypatch):
    """`fdjax.load` returns the embedded model at once, whatever the argument."""
    calls = []

    def load(model, **options):
        calls.append((model, options))
        return lm

    monkeypatch.setattr(fdjax, "load", load)
    return calls


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """A command line in an empty folder → (exit code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(platform, "enable_compilation_cache", lambda: None)

    def run(*argv, stdin: bytes | None = None):
        stream = None if stdin is None else io.TextIOWrapper(io.BytesIO(stdin))
        monkeypatch.setattr(sys, "stdin", stream)
        try:
            code = main(argv)
        except SystemExit as stopped:
            code = stopped.code
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def interruptible():
    """A process started here handles Ctrl-C, even if these tests run with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def folder(tmp_path):
    """A copy of the embedded checkpoint that a test may damage."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in locate("tiny").iterdir():
        if path.suffix in (".json", ".safetensors") and path.name != "training.json":
            shutil.copy(path, copy)
    return copy


def edit(path: Path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def is_one_line(err: str) -> bool:
    return err.startswith("fdjax") and err.count("\n") == 1 and "error: " in err


# Generating


@pytest.mark.usefixtures("lm")  # the command's model has the same programs
@pytest.mark.slow
def test_the_first_command_answers(run):
    assert run("generate", QUESTION) == (0, ANSWER + "\n", "")


def test_a_prompt_may_come_from_a_pipe(run, loaded):
    assert run("generate", stdin=QUESTION.encode() + b"\r\n") == (0, ANSWER + "\n", "")


def test_a_byte_order_mark_is_no_part_of_a_prompt(run, lm, loaded, monkeypatch):
    monkeypatch.setattr(lm, "stream", lambda prompt, **_: iter([prompt]))
    assert run("generate", stdin=codecs.BOM_UTF8 + b"hi") == (0, "hi\n", "")


@pytest.mark.slow
def test_json_is_one_line_and_complete(run, loaded):
    code, out, err = run("generate", "--json", QUESTION)
    assert (code, err, out.count("\n")) == (0, "", 1)
    data = json.loads(out)
    assert data["prompt"] == QUESTION
    assert data["text"].strip() == ANSWER
    assert data["finish_reason"] == "stop"
    assert data["stats"]["decode_tokens"] == len(data["tokens"])
    assert data["stats"]["decode_seconds"] > 0
    assert data["stats"]["compile_seconds"] >= 0


def test_several_samples_are_as_many_objects(run, lm, loaded, monkeypatch):
    asked = []
    result = fdjax.GenerateResult(
        tokens=[[5, 6], [7]],
        texts=[" one", "  two"],
        finish_reasons=["length", "stop"],
        logprobs=[[-1.0, -2.0], [-0.5]],
        top_logprobs=[[{5: -1.0}, {9: -1.5}], [{7: -0.5}]],
        stats=fdjax.Stats(prompt_tokens=3, decode_tokens=3),
    )

    def generate(prompt, **options):
        asked.append((prompt, options))
        return result

    monkeypatch.setattr(lm, "generate", generate)
    argv = ["generate", "hi", "--temperature", "2", "--num-return-sequences", "2"]
    code, out, err = run(*argv, "--json", "--logprobs", "1")
    assert (code, err, out.count("\n")) == (0, "", 2)
    samples = [json.loads(line) for line in out.splitlines()]
    assert [sample["text"] for sample in samples] == result.texts
    assert [sample["tokens"] for sample in samples] == result.tokens
    assert [sample["logprobs"] for sample in samples] == result.logprobs
    assert samples[0]["top_logprobs"] == [{"5": -1.0}, {"9": -1.5}]
    code, out, err = run(*argv, "-v")
    assert (code, out) == (0, "one\n---\n two\n")
    assert "3 prompt + 3 new tokens" in err
    options = {"temperature": 2.0, "num_return_sequences": 2}
    assert asked == [
        ("hi", options | {"return_logprobs": 1}),
        ("hi", options | {"return_logprobs": None}),
    ]


@pytest.mark.parametrize("options", [[], ["--temperature", "0"]])
def test_several_samples_of_the_likeliest_are_refused_before_loading(run, loaded, options):
    code, out, err = run("generate", "hi", "--num-return-sequences", "2", *options)
    assert (code, out, loaded) == (2, "", [])
    assert is_one_line(err)
    assert "--num-return-sequences needs a --temperature" in err


def test_several_samples_by_a_checkpoint_that_samples(run, lm, folder, loaded, monkeypatch):
    edit(folder / "generation_config.json", do_sample=True, temperature=0.5)
    result = fdjax.GenerateResult(
        [[5], [6]], ["a", "b"], ["stop"] * 2, logprobs=None, stats=fdjax.Stats()
    )
    monkeypatch.setattr(lm, "generate", lambda *_, **__: result)
    argv = ["generate", "hi", "--model", str(folder), "--num-return-sequences", "2"]
    assert run(*argv) == (0, "a\n---\nb\n", "")
    code, _, err = run(*argv, "--temperature", "0")
    assert (code, is_one_line(err)) == (2, True)


def test_a_system_message_makes_the_prompt_a_question(run, asked, lm, monkeypatch):
    assert run("generate", "hi", "--system", "Be brief.", "--seed", "1")[:2] == (0, "word \n")
    messages = [("system", "Be brief."), ("user", "hi")]
    assert asked == [(messages, {"seed": 1})]
    chat = []
    result = fdjax.GenerateResult([[5]], ["a"], ["stop"], logprobs=None, stats=fdjax.Stats())
    monkeypatch.setattr(lm, "chat", lambda *args, **_: chat.append(args) or result)
    assert run("generate", "hi", "--system", "Be brief.", "--json")[0] == 0
    assert chat == [([dict(role=role, content=text) for role, text in messages],)]
    assert run("generate", "hi", "--system", "")[0] == 2


@pytest.mark.parametrize("prompt", ["two\nlines", "an emoji 🌊", "-5 + 8 =", "tab\tand \x00"])
def test_any_text_is_a_prompt(run, loaded, prompt):
    code, out, err = run("generate", "--json", "--max-new-tokens", "2", prompt)
    assert (code, err) == (0, "")
    assert json.loads(out)["prompt"] == prompt


def test_options_reach_the_model(run, lm, loaded, monkeypatch):
    options = "--max-new-tokens 6 --temperature 1.5 --top-k 20 --top-p 0.9 --seed 7".split()
    given = {"max_new_tokens": 6, "temperature": 1.5, "top_k": 20, "top_p": 0.9, "seed": 7}
    options += ["--min-p", "0.1", "--repetition-penalty", "1.2", "--stop", " a", "--stop", "b"]
    given |= {"min_p": 0.1, "repetition_penalty": 1.2, "stop_strings": [" a", "b"]}
    options += ["--typical-p", "0.9", "--presence-penalty", "-1", "--frequency-penalty", "2"]
    given |= {"typical_p": 0.9, "presence_penalty": -1.0, "frequency_penalty": 2.0}
    options += ["--no-repeat-ngram-size", "3", "--min-new-tokens", "2"]
    given |= {"no_repeat_ngram_size": 3, "min_new_tokens": 2}
    seen = []

    def stream(prompt, **options):
        seen.append((prompt, options))
        yield "text"

    monkeypatch.setattr(lm, "stream", stream)
    assert run("generate", *options, "hi") == (0, "text\n", "")
    assert run("generate", "hi") == (0, "text\n", "")
    assert seen == [("hi", given), ("hi", {})]


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--max-new-tokens", (-1, 0, 2**31 - 1, 2**31)),
        ("--temperature", (-0.1, 0, 1e30, 1.1e30)),
        ("--top-k", (-1, 0, 2**31 - 1, 2**31)),
        ("--top-p", (-0.1, 0, 1, 1.1)),
        ("--min-p", (-0.1, 0, 1, 1.1)),
        ("--typical-p", (-0.1, 0, 1e-9, 1, 1.1)),
        ("--repetition-penalty", (0, 1e-31, 1e-30, 1e30, 1.1e30)),
        ("--presence-penalty", (-2.1, -2, 2, 2.1)),
        ("--frequency-penalty", (-2.1, -2, 2, 2.1)),
        ("--no-repeat-ngram-size", (-1, 0, 32, 33)),
        ("--seed", (-1, 0, 2**32 - 1, 2**32)),
    ],
)
def test_what_the_api_takes_is_no_misuse(option, values):
    def taken(function, error):
        try:
            function()
        except error:
            return False
        return True

    name = option.removeprefix("--").replace("-", "_")
    for value in values:
        argv = ["generate", f"{option}={value}", "hi"]
        assert taken(lambda argv=argv: _parser().parse_args(argv), SystemExit) == taken(
            lambda value=value: fdjax.GenerationConfig(**{name: value}), ValueError
        ), value


def test_a_minimum_raises_the_default_maximum(run, lm, loaded, asked, monkeypatch):
    seen = []
    monkeypatch.setattr(lm, "stream", lambda _, **options: seen.append(options) or iter(["text"]))
    default = lm.defaults.max_new_tokens
    for least in (default, default + 1):
        assert run("generate", "--min-new-tokens", str(least), "hi")[0] == 0
    assert seen == [
        {"min_new_tokens": default},
        {"min_new_tokens": default + 1, "max_new_tokens": default + 1},
    ]
    for least in (1024, 1025):
        assert run("chat", "--min-new-tokens", str(least), stdin=b"hi")[0] == 0
    assert [options["max_new_tokens"] for _, options in asked] == [1024, 1025]


@pytest.mark.slow
def test_a_seed_makes_samples_reproducible(run, loaded):
    command = "generate --json --max-new-tokens 6 --temperature 1.5 --top-k 20 --top-p 0.9".split()
    samples = [
        json.loads(run(*command, "--seed", str(seed), "Once upon a time")[1])["tokens"]
        for seed in (7, 7, 1, 2, 3, 4)
    ]
    assert samples[0] == samples[1]
    assert any(sample != samples[0] for sample in samples)


def test_model_and_dtype_are_what_is_loaded(run, loaded):
    asked = ["--dtype", "float16", "--kv-dtype", "int8"]
    run("generate", "--model", "some/folder", *asked, "--max-new-tokens", "1", "hi")
    options = {"dtype": "float16", "kv_dtype": "int8", "plan": None, "tensor_parallel": 1}
    assert loaded == [("some/folder", options)]


def test_no_tokens_is_an_empty_line(run, loaded):
    assert run("generate", "hi", "--max-new-tokens", "0") == (0, "\n", "")


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        ([" The", " end"], "The end"),
        ([" ", " two", " spaces"], "  two spaces"),
        (["    return", " 1"], "    return 1"),
        (["", "\n", "line"], "\nline"),
        ([], ""),
        ([" "], ""),
    ],
)
def test_only_the_space_that_joins_is_left_out(run, lm, loaded, monkeypatch, pieces, shown):
    monkeypatch.setattr(lm, "stream", lambda *a, **k: iter(pieces))
    assert run("generate", "hi")[:2] == (0, shown + "\n")


def test_output_that_the_terminal_cannot_show_is_replaced(lm, loaded, monkeypatch):
    monkeypatch.setattr(lm, "stream", lambda *a, **k: iter(["a 🌊", " b"]))
    out = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["generate", "hi"]) == 0
    assert out.buffer.getvalue() == b"a ? b\n"


# Chatting


CHAT = b"""What is the largest ocean?
What is 7 + 5?

/reset
What is the capital of Japan?
/quit
What is 1 + 1?"""


def test_piped_lines_are_answered_one_by_one(run, loaded):
    answers = [ANSWER, "7 + 5 = 12.", "The capital of Japan is Tokyo."]
    assert run("chat", stdin=CHAT) == (0, "\n".join(answers) + "\n", "")


@pytest.fixture
def asked(lm, loaded, monkeypatch):
    """The conversations that the model was asked to answer. Each answer is " word"."""
    seen = []

    class Stream:
        stats = "what it cost"
        result = types.SimpleNamespace(finish_reasons=["stop"])

        def __init__(self, messages, **options):
            seen.append(([(m["role"], m["content"]) for m in messages], options))

        def __iter__(self):
            return iter((" ", "word "))

        def close(self):
            pass

    monkeypatch.setattr(lm, "stream_chat", Stream)
    return seen


def test_a_conversation_is_remembered_until_reset(run, asked):
    piped = codecs.BOM_UTF8 + b"one\n two\n/reset\nthree\n"
    code, out, _ = run("chat", "--system", "Be brief.", stdin=piped)
    assert (code, out) == (0, "word \n" * 3)
    system, one = ("system", "Be brief."), ("user", "one")
    assert [messages for messages, _ in asked] == [
        [system, one],
        [system, one, ("assistant", "word"), ("user", " two")],
        [system, ("user", "three")],
    ]


@pytest.mark.parametrize("leave", ["/quit", "/exit", "quit", " exit "])
def test_what_leaves_a_conversation(run, asked, leave):
    assert run("chat", stdin=f"one\n{leave}\ntwo".encode()) == (0, "word \n", "")
    assert len(asked) == 1


def test_the_system_message_may_be_changed(run, asked):
    piped = b"/system Be brief.\none\n/system\ntwo\n"
    assert run("chat", "--system", "Be long.", stdin=piped)[0] == 0
    assert [messages for messages, _ in asked] == [
        [("system", "Be brief."), ("user", "one")],
        [("user", "one"), ("assistant", "word"), ("user", "two")],
    ]


def test_a_conversation_is_saved_as_messages(run, asked, tmp_path):
    code, _, err = run("chat", "--system", "Be brief.", stdin="één\n/save a/talk.json".encode())
    assert (code, err) == (0, "fdjax: 3 messages written to a/talk.json\n")
    assert json.loads((tmp_path / "a" / "talk.json").read_text()) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "één"},
        {"role": "assistant", "content": "word"},
    ]
    for command in ("/save", f"/save {tmp_path}"):
        code, _, err = run("chat", stdin=command.encode())
        assert (code, is_one_line(err)) == (1, True)
    expected = 1, "", "fdjax: error: ~no-such-user/x: no such user\n"
    assert run("chat", stdin=b"/save ~no-such-user/x") == expected


def test_a_quoted_message_has_several_lines(run, asked):
    piped = b'"""/reset\n\n  two\n"""\n"""one"""\n""" a\nb"""\n'
    assert run("chat", stdin=piped)[0] == 0
    assert [messages[-1][1] for messages, _ in asked] == ["/reset\n\n  two", "one", " a\nb"]
    code, _, err = run("chat", stdin=b'"""one\ntwo')
    assert (code, is_one_line(err), len(asked)) == (1, True, 3)


def test_an_unknown_command_is_named_and_a_path_is_a_message(run, asked):
    code, _, err = run("chat", stdin=b"/etc/hosts\n/ what\n/resett now\nhi")
    assert (code, err) == (
        1,
        "fdjax: error: chat: there is no /resett; /help lists the commands\n",
    )
    assert [messages[-1][1] for messages, _ in asked] == ["/etc/hosts", "/ what"]


def test_help_in_a_conversation_lists_the_commands(run, asked):
    code, out, err = run("chat", stdin=b"/help\n/?")
    assert (code, out) == (0, "")
    for command in ("/system", "/reset", "/save", "/quit", "/exit", "/help"):
        assert err.count(command) >= 2


# Scoring


@pytest.mark.slow
def test_scores_are_a_line_for_each_text(run, lm, loaded, tmp_path):
    texts = ["The capital of Japan is Tokyo.", "The largest ocean"]
    (tmp_path / "a.txt").write_text("two\nlines")
    expected = lm.score([*texts, "two\nlines"])
    code, out, err = run("score", *texts, "--file", "a.txt")
    assert (code, err) == (0, "")
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line.get("text") for line in lines] == [*texts, None]
    assert lines[2]["file"] == "a.txt"
    assert [line["perplexity"] for line in lines] == expected.perplexities
    assert [line["tokens"] for line in lines] == [len(ids) for ids in expected.tokens]
    assert lines[0]["logprob"] == pytest.approx(sum(expected.logprobs[0]))
    assert "logprobs" not in lines[0]
    piped = f"{texts[0]}\r\n\n{texts[1]}\n{texts[0]}".encode()
    code, out, _ = run("score", "--tokens", stdin=piped)
    piped_lines = [json.loads(line) for line in out.splitlines()]
    assert [line["ids"] for line in piped_lines] == [expected.tokens[i] for i in (0, 1, 0)]
    assert [len(line["logprobs"]) for line in piped_lines] == [
        len(line["ids"]) - 1 for line in piped_lines
    ]
    # Characters that end a line for Python, but not in a file of lines.
    code, out, _ = run("score", stdin="a\x0cb\nc\u2028d\r\ne\x85f\n".encode())
    assert [json.loads(line)["text"] for line in out.splitlines()] == [
        "a\x0cb",
        "c\u2028d",
        "e\x85f",
    ]


def test_a_long_text_is_scored_with_a_stride(run, lm, loaded, monkeypatch):
    calls = []

    def score(*args, **options):
        calls.append((args, options))
        return types.SimpleNamespace(tokens=[[3]], logprobs=[[]], perplexities=[math.nan])

    monkeypatch.setattr(lm, "score", score)
    code, out, _ = run("score", "--stride", "8", "--batch-size", "2", "x")
    assert (code, json.loads(out)["perplexity"]) == (0, None)
    assert calls == [((["x"],), {"stride": 8, "batch_size": 2})]


def test_a_stride_must_be_less_than_the_context(run, lm, loaded):
    code, out, err = run("score", "--stride", str(lm.engine.context), "x")
    assert (code, out) == (2, "")
    assert is_one_line(err) and "--stride must be less than" in err


def test_chat_options_reach_the_model(run, asked, tmp_path):
    (tmp_path / "mine.jinja").write_bytes(codecs.BOM_UTF8 + b"{{ messages }}")
    options = "--max-new-tokens 6 --temperature 1.5 --top-k 20 --top-p 0.9 --seed 7".split()
    given = {"max_new_tokens": 6, "temperature": 1.5, "top_k": 20, "top_p": 0.9, "seed": 7}
    assert run("chat", *options, "--chat-template", "mine.jinja", stdin=b"hi")[0] == 0
    assert run("chat", "--chat-template", "default", stdin=b"hi")[0] == 0
    assert run("chat", stdin=b"hi")[0] == 0
    assert [options for _, options in asked] == [
        given | {"chat_template": "{{ messages }}"},
        {"max_new_tokens": 1024, "chat_template": "default"},
        {"max_new_tokens": 1024},
    ]


def test_a_template_that_is_not_utf8_is_named(run, loaded, tmp_path):
    (tmp_path / "mine.jinja").write_bytes(b"{{ messages }}\xff")
    code, out, err = run("chat", "--chat-template", "mine.jinja", stdin=b"hi")
    assert (code, out, loaded) == (1, "", [])
    assert err == "fdjax: error: mine.jinja: not UTF-8 at byte 14\n"


def test_what_no_longer_fits_is_forgotten_in_pairs(run, asked):
    lines = [f"{i} " + "ocean " * 100 for i in range(6)]
    code, out, err = run("chat", "--system", "Be brief.", stdin="\n".join(lines).encode())
    assert (code, out) == (0, "word \n" * 6)
    assert err == "fdjax: the oldest messages no longer fit and are forgotten\n" * 3
    for i, (messages, _) in enumerate(asked):
        roles = [role for role, _ in messages]
        assert roles == ["system"] + ["user", "assistant"] * (len(roles) // 2 - 1) + ["user"]
        assert messages[-1][1].startswith(f"{i} ")
    kept = [len(messages) for messages, _ in asked]
    assert kept == [2, 4, 6, 6, 6, 6]


def test_an_answer_that_was_cut_short_says_so(run, loaded):
    code, out, err = run("chat", "--max-new-tokens", "2", stdin=QUESTION.encode())
    assert (code, out.strip()) == (0, "The largest")
    assert err.startswith("fdjax: cut short; --max-new-tokens") and err.count("\n") == 1


@pytest.mark.parametrize("command", [["generate", QUESTION], ["chat"]])
def test_verbose_tells_what_it_cost(run, loaded, command):
    assert run(*command, stdin=QUESTION.encode())[2] == ""
    code, out, err = run(*command, "-v", stdin=QUESTION.encode())
    assert (code, out) == (0, ANSWER + "\n")
    assert re.search(r"^fdjax: 7 prompt \+ 9 new tokens in .* tok/s", err, re.MULTILINE)
    assert run(*command, stdin=QUESTION.encode())[2] == ""


class TerminalOutput(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("command", [["generate", QUESTION], ["chat"]])
def test_a_terminal_shows_what_is_compiled_for_as_long(run, lm, loaded, monkeypatch, command):
    stream = lm.stream
    program = Program(lambda x: 2 * x, lambda x: f"something of {x.size}")

    def compiling(*args, **options):
        for size in (1, 1, 2):
            program(np.zeros(size, np.float32))
        return stream(*args, **options)

    monkeypatch.setattr(lm, "stream", compiling)
    notices = [f" [compiling something of {size}]" for size in (1, 2)]
    back = "\b" * len(notices[0])
    shown = "".join(notice + back + " " * len(back) + back for notice in notices)
    monkeypatch.setattr(sys, "stderr", TerminalOutput())
    assert run(*command, stdin=QUESTION.encode())[:2] == (0, ANSWER + "\n")
    assert sys.stderr.getvalue() == shown
    # With -v the message is logged. Without a terminal nothing is shown.
    program = Program(lambda x: 3 * x, lambda x: f"something of {x.size}")
    monkeypatch.setattr(sys, "stderr", TerminalOutput())
    run(*command, "-v", stdin=QUESTION.encode())
    assert "fdjax: compiling something of 2\nfdjax: compiled something" in sys.stderr.getvalue()
    assert "\b" not in sys.stderr.getvalue()
    program = Program(lambda x: 4 * x, lambda x: f"something of {x.size}")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    run(*command, stdin=QUESTION.encode())
    assert sys.stderr.getvalue() == ""
    assert program.compilations == 2


def test_a_line_that_cannot_be_answered_ends_a_pipe_with_one_line(run, loaded):
    code, out, err = run("chat", stdin=b"What is 7 + 5?\n" + b"ocean " * 1000)
    assert (code, out) == (1, "7 + 5 = 12.\n")
    assert is_one_line(err)
    code, out, err = run("chat", stdin=b"\xff\xfe\n")
    assert (code, out) == (1, "")
    assert is_one_line(err) and "line 1 must be UTF-8" in err


@pytest.mark.parametrize(
    ("edited", "argv", "message"),
    [
        ({"chat_template": None}, [], "no chat template"),
        ({"chat_template": 5}, [], "'chat_template' must be"),
        ({"chat_template": "{% if %}"}, [], "not valid Jinja"),
        ({}, ["--chat-template", "missing.jinja"], "'missing.jinja' is neither"),
        ({"chat_template": "{{ raise_exception('no\\nway') }}"}, [], "refuses these messages: no"),
    ],
)
def test_chat_without_a_sound_template_is_one_line(run, folder, edited, argv, message):
    edit(folder / "tokenizer_config.json", **edited)
    code, out, err = run("chat", "--model", str(folder), *argv, stdin=b"hi\n")
    assert (code, out) == (1, "")
    assert is_one_line(err)
    assert message in err


def test_chat_needs_a_tokenizer(run, folder):
    (folder / "tokenizer.json").unlink()
    code, out, err = run("chat", "--model", str(folder), stdin=b"")
    assert (code, out) == (1, "")
    assert is_one_line(err) and "no tokenizer.json" in err


class Terminal:
    """A program in its own terminal, and the text that it has shown there."""

    def __init__(self, *argv, folder):
        self.shown = ""
        self._master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (24, 80))
        self.process = subprocess.Popen(
            [sys.executable, *argv],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            cwd=folder,
            env=os.environ
            | {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(folder), "TERM": "dumb"},
        )
        os.close(slave)

    def until(self, text: str) -> None:
        """Wait until a text appears after the last text waited for."""
        while text not in self.shown:
            ready, _, _ = select.select([self._master], [], [], 60)
            assert ready, f"{text!r} not in {self.shown!r} after a minute"
            try:
                data = os.read(self._master, 1024)
            except OSError:
                data = b""
            assert data, f"{text!r} not in {self.shown!r}"
            self.shown += data.decode(errors="replace")
        self.shown = self.shown.partition(text)[2]

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())


@pytest.fixture
def small_folder(two_layers, tmp_path):
    """A copy of a smaller checkpoint, whose programs compile sooner."""
    return Path(shutil.copytree(two_layers, tmp_path / "small"))


@pytest.mark.slow
@pytest.mark.skipif(pty is None, reason="needs pseudo-terminals")
def test_ctrl_c_stops_the_answer_and_not_the_program(small_folder, tmp_path, interruptible):
    folder = small_folder
    # Without an end token, a story fills the context.
    edit(folder / "generation_config.json", eos_token_id=1023)
    edit(folder / "tokenizer_config.json", eos_token="<pad>")
    terminal = Terminal("-m", "fdjax.cli.main", "chat", "--model", str(folder), folder=tmp_path)
    terminal.until("> ")
    terminal.type("Once upon a time\n")
    terminal.until("time\r\n")
    terminal.until("decode steps")
    terminal.until("\b")  # compiled
    terminal.process.send_signal(signal.SIGINT)
    terminal.until("> ")
    time.sleep(1)  # readline shows its prompt before it handles a signal
    terminal.process.send_signal(signal.SIGINT)
    terminal.until("/quit")
    terminal.until("> ")
    terminal.type("ocean " * 600 + "\n")
    terminal.until("error: ")
    terminal.until("> ")
    terminal.type("\x04")
    assert terminal.process.wait(timeout=60) == 0


SCRIPT = """
import fdjax
lm = fdjax.load("tiny")
print(lm.generate("What is the largest ocean?", max_new_tokens=2).text)
"""


@pytest.mark.slow
@pytest.mark.skipif(pty is None, reason="needs pseudo-terminals")
def test_a_script_in_a_terminal_shows_what_it_does(tmp_path):
    terminal = Terminal("-c", SCRIPT, folder=tmp_path)
    terminal.until("tiny: ")
    terminal.until("%")
    terminal.until("[compiling prefill of 1 x ")
    terminal.until("\b")
    terminal.until("The largest")
    assert terminal.process.wait(timeout=60) == 0
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(tmp_path)}
    piped = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, check=True)
    assert (piped.stdout.strip(), piped.stderr) == (b"The largest", b"")


# Misuse


@pytest.mark.parametrize(
    "options",
    [
        "--max-new-tokens -1",
        "--max-new-tokens abc",
        "--max-new-tokens 1.5",
        "--temperature -1",
        "--temperature 1e31",
        "--temperature nan",
        "--temperature inf",
        "--temperature hot",
        "--top-k -1",
        "--top-k 4294967296",
        "--top-p -1",
        "--top-p 2",
        "--top-p nan",
        "--seed -1",
        "--seed 4294967296",
        "--min-p 2",
        "--repetition-penalty 0",
        "--typical-p 0",
        "--presence-penalty 3",
        "--frequency-penalty nan",
        "--no-repeat-ngram-size 33",
        "--min-new-tokens -1",
        "--num-return-sequences 0",
        "--logprobs 21 --json",
        "--stop=",
        "--dtype int8",
        "--model=",
        "--nonsense",
        "--max-new 5",
        "two three",
    ],
)
def test_a_wrong_option_is_found_before_anything_is_loaded(run, loaded, options):
    code, out, err = run("generate", "hi", *options.split())
    assert (code, out, loaded) == (2, "", [])
    assert is_one_line(err)
    assert "--help" in err
    option = options.partition("=")[0].split()[0]
    assert option in err


@pytest.mark.parametrize(
    ("argv", "stdin"),
    [
        (["generate"], None),
        (["generate"], b""),
        (["generate"], b" \n"),
        (["generate", ""], None),
        (["generate", "  "], None),
        (["generate", "--logprobs", "1", "hi"], None),
        (["generate", "--max-new-tokens", "3", "--min-new-tokens", "5", "hi"], None),
        (["generate", "--max-new-tokens", "99999999999", "hi"], None),
        (["chat", "--max-new-tokens", "3", "--min-new-tokens", "5"], None),
        (["generate"], b"What is \xff\xfe?"),
        (["generate", "What is \udcff?"], None),
        (["generate", "What is \ud800?"], None),
        (["chat", "What is 7 + 5?"], None),
        (["score"], None),
        (["score"], b"\n"),
        (["score"], b"\xff"),
        (["score", "a", " "], None),
        (["score", "a", "--stride", "0"], None),
        (["chat", "--max-new-tokens", "x"], None),
        (["doctor", "--batch", "1"], None),
        (["info", ""], None),
        (["info", "--batch", "0"], None),
        (["info", "--batch", "9" * 400], None),
        (["info", "--context", "1000000000000"], None),
        (["info", "--beams", "2", "--new-tokens", "512"], None),
        (["info", "--beams", "2", "--context", "128"], None),
        (["info", "--beams", "65"], None),
        (["bench", "--batch", "0"], None),
        (["bench", "--new-tokens", "1"], None),
        (["bench", "--runs", "0"], None),
        (["bench", "--prompt-tokens", "0"], None),
        (["bench", "--prompt-tokens", "1000"], None),
        (["bench", "--implementation", "magic"], None),
        (["frobnicate"], None),
    ],
)
def test_misuse_is_one_line_and_exit_code_2(run, loaded, argv, stdin):
    code, out, err = run(*argv, stdin=stdin)
    assert (code, out, loaded) == (2, "", [])
    assert is_one_line(err)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_arguments_in_another_locale_are_utf8_all_the_same(
    run, lm, loaded, asked, monkeypatch, encoding
):
    text = "wave 🌊"
    # Python makes this of an argument if the locale has this encoding.
    mangled = text.encode().decode(encoding, "surrogateescape")
    monkeypatch.setattr(os, "fsencode", lambda name: name.encode(encoding, "surrogateescape"))
    monkeypatch.setattr(lm, "stream", lambda prompt, stop_strings: iter([prompt, *stop_strings]))
    assert run("generate", mangled, "--stop", mangled) == (0, f"{text}{text}\n", "")
    assert run("generate", mangled, "--system", mangled)[0] == 0
    assert run("chat", "--system", mangled, "--stop", mangled, stdin=b"hi")[0] == 0
    assert [messages for messages, _ in asked] == [
        [("system", text), ("user", text)],
        [("system", text), ("user", "hi")],
    ]
    assert asked[1][1]["stop_strings"] == [text]
    result = types.SimpleNamespace(perplexities=[2.0], tokens=[[5]], logprobs=[[]])
    monkeypatch.setattr(lm, "score", lambda texts, **_: result)
    code, out, _ = run("score", mangled)
    assert (code, json.loads(out)["text"]) == (0, text)


@pytest.mark.parametrize(
    "argv",
    [
        "generate hi --stop X",
        "generate hi --system X",
        "chat --stop X",
        "chat --system X",
        "score X",
    ],
)
def test_a_text_that_is_not_utf8_is_misuse(run, loaded, argv):
    code, out, err = run(*(word.replace("X", "a\udcff") for word in argv.split()))
    assert (code, out, loaded) == (2, "", [])
    assert is_one_line(err) and "is not UTF-8 at byte 1" in err


@pytest.mark.parametrize(
    "argv",
    [
        "generate --output out --input=",
        "generate --input in --output=",
        "generate hi --table=",
        "score --file=",
        "bench --output=",
        "calibrate --text=",
        "calibrate --text in --output=",
        "calibrate --text in --plot=",
        "quantize --output=",
        "quantize --output out --text=",
        "tune --output=",
    ],
)
def test_an_empty_path_is_misuse(run, loaded, argv):
    command, option = argv.split()[0], argv.split()[-1].removesuffix("=")
    problem = f"argument {option}: must be a path, got nothing; see fdjax {command} --help"
    assert run(*argv.split()) == (2, "", f"fdjax {command}: error: {problem}\n")


def test_no_command_is_answered_with_help(run):
    code, out, err = run()
    assert (code, out) == (2, "")
    assert "examples:" in err


@pytest.mark.parametrize("command", [[], *([c] for c in COMMANDS)])
def test_help_says_all_in_a_page(run, command):
    code, out, err = run(*command, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(" ".join(["usage: fdjax", *command]))
    assert len(out.splitlines()) < 70


def test_version(run):
    assert run("--version") == (0, f"fdjax {fdjax.__version__}\n", "")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            "generate hi --max-tokens 5",
            "fdjax generate: error: unrecognized arguments: "
            "--max-tokens 5, did you mean --max-new-tokens?; see fdjax generate --help",
        ),
        (
            "bench --bach=2",
            "fdjax bench: error: unrecognized arguments: "
            "--bach=2, did you mean --batch?; see fdjax bench --help",
        ),
        (
            "generate hi you",
            "fdjax generate: error: unrecognized arguments: "
            "you, put the whole prompt in quotes; see fdjax generate --help",
        ),
        (
            "info --model here",
            "fdjax info: error: unrecognized arguments: "
            "--model, the model comes without --model; see fdjax info --help",
        ),
        (
            "chat here",
            "fdjax chat: error: unrecognized arguments: "
            "here, did you mean --model here?; see fdjax chat --help",
        ),
        ("--xyz", "fdjax: error: unrecognized arguments: --xyz; see fdjax --help"),
        (
            "genrate hi",
            "fdjax: error: there is no command 'genrate', did you mean generate?; see fdjax --help",
        ),
    ],
)
def test_a_mistyped_word_is_told_by_its_command(run, argv, message):
    assert run(*argv.split()) == (2, "", message + "\n")


# Failure


def test_a_prompt_beyond_the_context_is_an_error(run, loaded):
    code, out, err = run("generate", stdin=b"ocean " * 1000)
    assert (code, out) == (1, "")
    assert is_one_line(err)
    assert "context" in err


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_a_model_without_tokenizer_is_an_error(run, folder, as_json):
    (folder / "tokenizer.json").unlink()
    code, out, err = run("generate", "hi", "--model", str(folder), *as_json)
    assert (code, out) == (1, "")
    assert is_one_line(err)
    assert "no tokenizer.json" in err


DAMAGE = {
    "no config": lambda f: (f / "config.json").unlink(),
    "empty config": lambda f: (f / "config.json").write_text(""),
    "config not UTF-8": lambda f: (f / "config.json").write_bytes(b'{"a": "\xff"}'),
    "config is a folder": lambda f: ((f / "config.json").unlink(), (f / "config.json").mkdir()),
    "another family": lambda f: edit(f / "config.json", model_type="mamba"),
    "another width": lambda f: edit(f / "config.json", intermediate_size=641),
    "fewer layers": lambda f: edit(f / "config.json", num_hidden_layers=4),
    "no weights": lambda f: (f / "model.safetensors").unlink(),
    "cut weights": lambda f: os.truncate(f / "model.safetensors", 100_000),
    "empty weights": lambda f: os.truncate(f / "model.safetensors", 0),
    "bad tokenizer": lambda f: (f / "tokenizer.json").write_text("x"),
    "bad defaults": lambda f: edit(f / "generation_config.json", temperature="hot"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_model_is_one_line(run, folder, damage):
    DAMAGE[damage](folder)
    code, out, err = run("generate", "hi", "--model", str(folder))
    assert (code, out) == (1, "")
    assert is_one_line(err)


def test_a_folder_of_the_name_of_the_embedded_model(run, tmp_path, loaded, monkeypatch):
    (tmp_path / "tiny").mkdir()
    assert run("generate", "--max-new-tokens", "0", "hi") == (0, "\n", "")
    assert run("info")[0] == 0
    assert loaded[0][0] == str(locate(loaded[0][0])) and Path(loaded[0][0]).is_absolute()
    code, _, err = run("info", "tiny")
    assert (code, is_one_line(err)) == (1, True)
    assert "tiny: this folder has no config.json; to use the embedded model" in err
    shutil.copy(locate(loaded[0][0]) / "config.json", tmp_path / "tiny")
    assert run("info", "tiny")[0] == 0


def test_messages_with_control_characters_reach_no_terminal(run):
    code, _, err = run("info", "no\x1b[2Jwhere")
    assert (code, is_one_line(err), "\x1b" in err) == (1, True, False)


@pytest.mark.parametrize("name", ["nowhere", "./no/where", "/dev/null"])
def test_no_such_model_is_one_line(run, name):
    for command in (
        ["generate", "hi", "--model", name],
        ["chat", "--model", name],
        ["info", name],
        ["bench", name],
    ):
        code, out, err = run(*command)
        assert (code, out) == (1, "")
        assert is_one_line(err)
        assert name in err


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            jax.errors.JaxRuntimeError(
                "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12.00GiB.\nmore"
            ),
            ("12.00GiB", "--dtype bfloat16", "batch", "fdjax info"),
        ),
        (MemoryError("Unable to allocate 9 TiB"), ("9 TiB", "smaller model")),
        (MemoryError(), ("out of memory;",)),
        (FloatingPointError("logits are not finite"), ("not finite",)),
        (platform.NoDeviceError("JAX cannot run on platform 'x'"), ("platform 'x'",)),
        (NotImplementedError("matmul: cannot"), ("matmul: cannot",)),
        (OSError(28, "No space left on device"), ("No space left",)),
    ],
    ids=lambda x: type(x).__name__,
)
def test_what_a_user_can_cure_is_explained(run, lm, loaded, monkeypatch, error, message):
    def fail(*args, **kwargs):
        raise copy.copy(error)  # a raised error itself would keep the model alive

    monkeypatch.setattr(lm, "generate", fail)
    code, out, err = run("generate", "--json", "hi")
    assert (code, out) == (1, "")
    assert is_one_line(err)
    assert all(words in err for words in message)


def test_a_bug_keeps_its_traceback(run, lm, loaded, monkeypatch):
    def fail(*args, **kwargs):
        raise jax.errors.JaxRuntimeError("INTERNAL: no such thing")

    monkeypatch.setattr(lm, "generate", fail)
    with pytest.raises(jax.errors.JaxRuntimeError):
        run("generate", "--json", "hi")


@pytest.mark.filterwarnings("default")
def test_a_warning_is_one_line_and_showing_it_is_undone(run, lm, loaded, monkeypatch):
    before = warnings.showwarning

    def warn(*args, **kwargs):
        warnings.warn("take care", stacklevel=1)
        warnings.warn("take care", stacklevel=1)  # another place, so Python shows it again
        yield "text"

    monkeypatch.setattr(lm, "stream", warn)
    for _ in range(2):
        assert run("generate", "hi") == (0, "text\n", "fdjax: warning: take care\n")
    assert warnings.showwarning is before


# Interruption and pipes


def test_an_interruption_is_exit_code_130(run, lm, loaded, monkeypatch):
    def stream(*args, **kwargs):
        yield "some"
        raise KeyboardInterrupt

    monkeypatch.setattr(lm, "stream", stream)
    assert run("generate", "hi") == (130, "some", "\n")


@pytest.mark.slow
def test_ctrl_c_while_generating(folder, tmp_path, interruptible):
    # Without an end token, a story fills the context.
    edit(folder / "generation_config.json", eos_token_id=1023)
    command = ["generate", "--model", str(folder), "--max-new-tokens", "10000", "Once upon a time"]
    process = subprocess.Popen(
        [sys.executable, "-m", "fdjax.cli.main", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(tmp_path)},
    )
    seen = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert seen
    assert (process.returncode, err.strip()) == (130, b"")


@pytest.fixture
def print_to(monkeypatch):
    """Make this file a standard stream. Closing it afterwards must raise nothing."""
    files = []

    def print_to(file, name="stdout"):
        files.append(file)
        monkeypatch.setattr(sys, name, file)

    yield print_to
    for file in files:
        file.close()


def pipe_without_reader():
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


@pytest.mark.parametrize("command", [["generate", "hi"], ["info"]])
def test_a_reader_that_has_seen_enough(lm, loaded, monkeypatch, capsys, print_to, command):
    monkeypatch.setattr(lm, "stream", lambda *a, **k: iter(["some", "text"]))
    print_to(pipe_without_reader())
    assert main(command) == 141
    assert capsys.readouterr().err == ""


def test_a_reader_of_messages_that_has_seen_enough(print_to):
    print_to(pipe_without_reader(), "stdout")
    print_to(pipe_without_reader(), "stderr")
    assert main(["generate", "--nonsense"]) == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("command", [["generate", "hi"], ["info"]])
def test_a_full_disk(lm, loaded, monkeypatch, capsys, print_to, command):
    monkeypatch.setattr(lm, "stream", lambda *a, **k: iter(["some", "text"]))
    print_to(os.fdopen(os.open("/dev/full", os.O_WRONLY), "w"))
    assert main(command) == 1
    assert is_one_line(capsys.readouterr().err)


def test_no_output_at_all(lm, loaded, monkeypatch, capsys):
    monkeypatch.setattr(lm, "stream", lambda *a, **k: iter(["some", "text"]))
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["generate", "hi"]) == 0


def test_messages_without_standard_error_are_no_output(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["generate", ""]) == 2
    assert capsys.readouterr().out == ""


# Info and bench


def test_info_of_folder_config_and_embedded_model_agree(run, folder):
    said = [run("info", name) for name in ("tiny", str(folder), str(folder / "config.json"))]
    assert said[0] == said[1] == said[2]
    assert said[0][0] == 0
    assert "3,705,600" in said[0][1]
    assert "7.411 MB" in said[0][1]
    assert run("info")[1] == said[0][1]


def test_info_plans_for_a_gpu_that_is_not_here(run, tmp_path):
    config = Path(__file__).parents[1] / "fixtures" / "hf" / "configs" / "llama-2-7b.new.json"
    code, out, err = run("info", str(config), "--device", "h100", "--json")
    assert (code, err) == (0, "")
    data = json.loads(out)
    assert data["device"] == "NVIDIA H100 80GB HBM3"
    # JAX reported 63 763 906 560 for its 75 %.
    assert data["device_bytes"] == pytest.approx(63_763_906_560 / 0.75 * 0.9, abs=1)
    _, out, _ = run(
        *("info", str(config), "--device", "h100", "--gpu-memory-utilization", "0.75", "--json")
    )
    assert json.loads(out)["device_bytes"] == 63_763_906_560
    assert "mosaic_gpu" in {runs for _, _, runs, _ in data["choices"]}
    code, out, _ = run("info", str(config), "--device", "a100", "--memory", "40GB", "--json")
    data = json.loads(out)
    assert (data["device"], data["device_bytes"]) == ("NVIDIA A100-SXM4-80GB", 40 * 10**9)
    assert run("info", "--device", "abacus")[0] == 2


@pytest.mark.parametrize(
    ("environment", "argument", "expected"),
    [
        ({}, [], {"XLA_CLIENT_MEM_FRACTION": "0.9"}),
        ({}, ["0.5"], {"XLA_CLIENT_MEM_FRACTION": "0.5"}),
        ({"XLA_CLIENT_MEM_FRACTION": "0.4"}, [], {"XLA_CLIENT_MEM_FRACTION": "0.4"}),
        ({"XLA_CLIENT_MEM_FRACTION": "0.4"}, ["1"], {"XLA_CLIENT_MEM_FRACTION": "1.0"}),
        # JAX refuses both names at once.
        (
            {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.4"},
            ["0.8"],
            {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.8"},
        ),
        (
            {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
            [],
            {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        ),
    ],
)
def test_the_share_of_memory(run, monkeypatch, environment, argument, expected):
    def xla():
        return {name: value for name, value in os.environ.items() if re.match("XLA.*CLIENT", name)}

    for name in xla():
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    seen = []
    monkeypatch.setattr(info, "model_of", lambda args: (seen.append(xla()), model_of(args))[1])
    assert run("info", *(f"--gpu-memory-utilization={share}" for share in argument))[0] == 0
    assert (seen, xla()) == ([expected], environment)


@pytest.mark.parametrize("share", ["0", "1.1", "-1", "nan", "much"])
def test_a_share_of_memory_that_is_none(run, share):
    code, out, err = run("info", f"--gpu-memory-utilization={share}")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "must be a number above 0 and at most 1" in err


@pytest.mark.parametrize("name", DEVICES)
def test_known_devices_are_known_to_the_statistics_too(name):
    assert DEVICES[name].kind in results.PEAK_GB_PER_S


def test_info_as_json(run):
    code, out, err = run("info", "--json", "--batch", "4", "--dtype", "float32")
    assert (code, err, out.count("\n")) == (0, "", 1)
    data = json.loads(out)
    assert (data["parameters"], data["weight_bytes"]) == (3_705_600, 4 * 3_705_600)
    assert all("M=4" in shape for op, shape, *_ in data["choices"] if op == "matmul")


def test_a_missing_config_is_named(run):
    code, _, err = run("info", "there/is/none.json")
    assert (code, err) == (1, "fdjax: error: there/is/none.json: no such file\n")


@pytest.fixture
def quick_ceiling(monkeypatch):
    from fdjax.bench import model

    ceiling = {"read_gb_per_s": 1.0, "matmul_tflop_per_s": None, "trusted": None, "reason": None}
    ceiling |= {"read_kernel": "none", "clock": "host"}
    monkeypatch.setattr(model, "measure_ceiling", lambda *a, **k: dict(ceiling))


BENCH = "--batch 2 --prompt-tokens 8 --new-tokens 4 --runs 1".split()


@pytest.mark.slow
def test_bench_prints_a_table_and_writes_a_record(run, loaded, quick_ceiling, tmp_path):
    from fdjax.bench import model

    code, out, err = run("bench", *BENCH, "--commit", "abc", "--output", "a/record.json")
    assert code == 0
    assert all(line.startswith("fdjax: ") for line in err.splitlines())
    assert [word in err for word in ("loading", "bandwidth", "compiling", "warm up")] == [True] * 4
    record = records.read(tmp_path / "a/record.json")
    assert record.environment["commit"] == "abc"
    assert (record.config["batch"], record.config["prompt_tokens"]) == (2, 8)
    assert [row.ok for row in record.rows] == [True, True]
    assert [row.timing["runs"] for row in record.rows] == [1, 1]
    assert out == f"{record.table()}\n{model.summary(record)}\n" and "tokens/s" in out


@pytest.fixture
def benched(monkeypatch):
    """The models that would have been measured, and the arguments."""
    from fdjax.bench import model

    seen = []

    def bench_model(lm, **options):
        seen.append((lm, options))
        environment = {"device_kind": "cpu", "device_count": 1}
        return records.Record(environment, {}, {}, [records.Measurement("case", "fdjax", ok=True)])

    monkeypatch.setattr(model, "bench_model", bench_model)
    return seen


def test_the_last_line_of_bench_is_the_record(run, lm, loaded, benched, tmp_path):
    code, out, err = run("bench", *BENCH, "--commit", "abc")
    loading = "fdjax: loading 3,705,600 parameters in bfloat16 on cpu\n"
    assert (code, err) == (0, loading)
    assert json.loads(out.splitlines()[-1])["rows"][0]["case"] == "case"
    options = {"batch": 2, "prompt_tokens": 8, "new_tokens": 4, "runs": 1, "commit": "abc"}
    ((benched_lm, given),) = benched
    assert (benched_lm, given.pop("progress") is not None, given) == (lm, True, options)
    code, out, err = run("bench", "--output", "a/record.json")
    assert (code, err) == (0, f"{loading}fdjax: the record is in a/record.json\n")
    assert "case" in out and "{" not in out
    assert records.read(tmp_path / "a/record.json").rows[0].ok
    assert benched[1][1]["runs"] == 15


@pytest.mark.slow
def test_bench_of_a_config_alone_takes_random_weights(run, folder, benched):
    assert run("bench", *BENCH, "--dtype", "float32", str(folder / "config.json"))[0] == 0
    ((lm, _),) = benched
    assert lm.model.dtype == "float32"
    assert not lm.tokenizer
    weights = np.asarray(fdjax.load(str(folder)).params["embed"], np.float32)
    assert not np.allclose(lm.params["embed"], weights)


def test_bench_finds_what_cannot_be_before_it_measures(run, loaded, folder, tmp_path):
    edit(folder / "config.json", intermediate_size=2**30)
    for argv, message in (
        (["--batch", str(10**12)], "out of memory"),
        (["--output", str(tmp_path)], "directory"),
        (["--output", "/dev/null/x"], "/dev/null"),
        ([str(folder / "config.json")], "out of memory"),
    ):
        code, out, err = run("bench", *argv)
        assert (code, out, loaded) == (1, "", [])
        assert is_one_line(err)
        assert message in err


def test_bench_leaves_no_file_where_it_fails(run, tmp_path):
    assert run("bench", "--output", "record.json", "nowhere")[0] == 1
    assert not (tmp_path / "record.json").exists()


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="a GPU may run them")
@pytest.mark.parametrize("implementation", ["cudnn", "mosaic_gpu"])
def test_what_needs_a_gpu_is_misuse_without_one(run, loaded, implementation):
    code, _, err = run("bench", "--implementation", implementation)
    assert (code, is_one_line(err), loaded) == (2, True, [])


def test_bench_names_the_implementations_there_are(run):
    assert "{" + ",".join(NAMES) + "}" in run("bench", "--help")[1]


# The machine


@pytest.fixture
def no_cache_yet():
    configured = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", configured)


def test_the_cache_is_in_the_users_cache_folder(no_cache_yet, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    platform.enable_compilation_cache()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "fdjax" / "xla")
    platform.enable_compilation_cache(tmp_path / "other")
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "fdjax" / "xla")


@pytest.mark.parametrize("lack", ["home", "permission", "folder"])
def test_no_place_for_a_cache_is_no_reason_to_stop(no_cache_yet, monkeypatch, tmp_path, lack):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if lack == "home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    elif lack == "permission":
        monkeypatch.setattr(os, "access", lambda *a: False)
    else:
        (tmp_path / "fdjax").write_text("a file")
    platform.enable_compilation_cache()
    assert jax.config.jax_compilation_cache_dir is None


@pytest.mark.parametrize("error", [RuntimeError("Unable to initialize\nmore"), AssertionError()])
def test_a_platform_that_jax_lacks_is_one_line(run, monkeypatch, error):
    def fail():
        raise error

    monkeypatch.setattr(jax, "default_backend", fail)
    for command in (["info"], ["bench"], ["generate", "hi"], ["chat"]):
        code, out, err = run(*command)
        assert (code, out) == (1, "")
        assert is_one_line(err)
        assert "JAX cannot run on platform" in err


@pytest.mark.parametrize(
    ("backend", "driver", "asked", "visible", "warned"),
    [
        ("cpu", True, None, None, True),
        ("cpu", True, None, "0", True),
        ("cpu", True, None, "", False),
        ("cpu", True, "cpu", None, False),
        ("cpu", False, None, None, False),
        ("gpu", True, None, None, False),
    ],
)
def test_a_gpu_that_nobody_uses(monkeypatch, backend, driver, asked, visible, warned):
    class Config:
        jax_platforms = asked

    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "config", Config)
    monkeypatch.setattr(platform, "nvidia_driver_present", lambda: driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        platform.warn_of_idle_gpu()
    assert bool(seen) == warned
