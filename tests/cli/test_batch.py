"""`fdjax generate --input`: every line of a file gets one answer, even after interruptions."""

import dataclasses
import importlib
import json
import os
import pkgutil
import shutil
import signal
import subprocess
import sys
import time

import jax
import pytest
from safetensors.numpy import load_file, save_file

import fdjax
from fdjax.cli.main import main

pytestmark = pytest.mark.usefixtures("quick_compiles")

LINES = ["Once upon a time", {"prompt": "What is 7 + 5?", "id": "q7"}, {"prompt": [5, 6, 7]}]
LINES += [{"messages": [{"role": "user", "content": "What is 7 + 5?"}], "id": {"nested": 1}}]
OPTIONS = ["--max-new-tokens", "6"]


@pytest.fixture(autouse=True)
def by_default(two_layers, monkeypatch):
    """The model of a command that names none: a smaller one, whose programs compile sooner."""
    # Commands are imported when they are first called. Those that copy the name shall do so now.
    for module in pkgutil.iter_modules(fdjax.cli.__path__, "fdjax.cli."):
        importlib.import_module(module.name)
    monkeypatch.setattr("fdjax.cli.shared.EMBEDDED", two_layers)
    return two_layers


@pytest.fixture
def files(tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, LINES)) + "\n")
    return source, target


def run(files, *options):
    source, target = files
    return main(["generate", "--input", str(source), "--output", str(target), *OPTIONS, *options])


def answers(target):
    return [json.loads(line) for line in target.read_text().splitlines()]


def by_index(target):
    found = sorted(answers(target), key=lambda answer: answer["index"])
    assert [answer["index"] for answer in found] == list(range(len(found)))
    return found


@pytest.mark.slow
def test_each_line_has_its_answer_and_its_id(files, by_default, capsys):
    assert run(files) == 0
    found = by_index(files[1])
    assert [answer["id"] for answer in found] == [0, "q7", 2, {"nested": 1}]
    lm = fdjax.load(by_default)
    expected = lm.generate(["Once upon a time", "What is 7 + 5?", [5, 6, 7]], max_new_tokens=6)
    chat = lm.chat(LINES[3]["messages"], max_new_tokens=6)
    assert [answer["tokens"] for answer in found] == [*expected.tokens, *chat.tokens]
    assert [answer["text"] for answer in found] == [*expected.texts, *chat.texts]
    assert "4 prompts, 4 without an answer" in capsys.readouterr().err


@pytest.mark.slow
def test_it_goes_on_where_it_stopped_and_repairs_a_line_that_was_cut(files, capsys):
    run(files)
    whole = files[1].read_bytes().splitlines(keepends=True)
    files[1].write_bytes(b"".join(whole[:3]) + whole[3][:20])
    assert run(files) == 0
    assert "1 without an answer" in capsys.readouterr().err
    assert sorted(files[1].read_bytes().splitlines(keepends=True)) == sorted(whole)
    before = files[1].read_bytes()
    assert run(files) == 0 and files[1].read_bytes() == before


def test_a_minimum_raises_the_default_maximum(files, monkeypatch):
    """As it does for a single prompt."""
    lm = fdjax.load("tiny")
    seen = []
    monkeypatch.setattr("fdjax.cli.batch.load_model", lambda args: lm)
    monkeypatch.setattr(lm, "generate_iter", lambda _, **options: seen.append(options) or iter(()))
    least = lm.defaults.max_new_tokens + 1
    source, target = map(str, files)
    argv = ["generate", "--input", source, "--output", target, "--min-new-tokens", str(least)]
    assert main(argv) == 0
    assert (seen[0]["min_new_tokens"], seen[0]["max_new_tokens"]) == (least, least)


@pytest.mark.slow
@pytest.mark.parametrize(
    "what",
    ["options", *(pytest.param(what, marks=pytest.mark.slow) for what in ("input", "model"))],
)
def test_answers_of_something_else_are_not_mixed(files, capsys, what, tmp_path):
    run(files)
    before = files[1].read_bytes()
    options = []
    if what == "options":
        options = ["--temperature", "0.5"]
    elif what == "input":
        files[0].write_text('"Another"\n')
    else:
        beside = tmp_path / "out.jsonl.run.json"
        beside.write_text(beside.read_text().replace("two_layers", "other"))
    assert run(files, *options) == 2
    assert f"holds answers of another {what}" in capsys.readouterr().err
    assert files[1].read_bytes() == before


@pytest.mark.parametrize("content", ["", "{", "[]", "null"])
def test_answers_without_sound_settings_are_left_alone(files, capsys, tmp_path, content):
    files[1].write_text('{"index": 0}\n')
    (tmp_path / "out.jsonl.run.json").write_text(content)
    assert run(files) == 2
    assert "exists without out.jsonl.run.json, its settings" in capsys.readouterr().err


@pytest.mark.slow
def test_answers_of_other_weights_are_not_mixed(files, by_default, capsys, tmp_path):
    folder = shutil.copytree(by_default, tmp_path / "model")
    assert run(files, "--model", str(folder)) == 0
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] *= 2
    save_file(tensors, folder / "model.safetensors")
    assert run(files, "--model", str(folder)) == 2
    assert "holds answers of another model" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["generation_config.json", "chat_template.jinja"])
def test_answers_of_other_defaults_are_not_mixed(files, by_default, capsys, tmp_path, name):
    folder = shutil.copytree(by_default, tmp_path / "model")
    assert run(files, "--model", str(folder)) == 0
    (folder / name).write_text('{"temperature": 5.0}')
    assert run(files, "--model", str(folder)) == 2
    assert "holds answers of another model" in capsys.readouterr().err


def test_a_folder_that_is_no_checkpoint_is_named(files, capsys, tmp_path):
    assert run(files, "--model", str(tmp_path)) == 1
    assert "no config.json; is this a checkpoint folder?" in capsys.readouterr().err
    assert not files[1].exists()


@pytest.mark.skipif(sys.platform != "linux", reason="file names must be UTF-8")
def test_a_model_with_names_that_are_not_utf8(files, by_default, tmp_path):
    folder = shutil.copytree(by_default, tmp_path / "\udcff")
    (folder / "\udcfe.json").touch()
    assert run(files, "--model", str(folder)) == 0
    assert run(files, "--model", str(folder)) == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ('{"id": 3}', 'line 2 must have either "prompt" or "messages"'),
        ('{"prompt": "a", "messages": []}', 'line 2 must have either "prompt" or "messages"'),
        ('{"prompt": "a", "temperature": 1}', "unknown field 'temperature'"),
        ("7", "line 2 must be a text, token ids or an object"),
        ("null", "line 2 must be a text, token ids or an object"),
        ('{"prompt": null}', '"prompt" of line 2 must be a text or token ids'),
        ('{"messages": "Hi"}', '"messages" of line 2 must be a list of messages'),
        ('{"prompt": "a", "id": NaN}', "line 2 is not JSON: NaN"),
        ('{"prompt": "a", "id": 1e999}', "line 2 is not JSON: 1e999 is too large"),
        ("[" * 100_000, "line 2 is not JSON: maximum recursion depth"),
        ("\xff", "line 2 is not JSON: 'utf-8' codec can't decode"),
    ],
    ids=lambda value: value[:20],
)
def test_a_line_that_is_none_ends_it_before_anything_runs(files, capsys, line, message):
    files[0].write_text('"Hello"\n' + line + "\n", encoding="latin-1")
    assert run(files) == 2
    assert message in capsys.readouterr().err
    assert not files[1].exists()


@pytest.mark.slow
def test_a_prompt_that_is_refused_has_an_error(files, capsys):
    files[0].write_text('{"messages": [1]}\n[]\n{"prompt": "Hello", "id": "\\ud800"}\n')
    assert run(files) == 0
    chat, empty, answered = by_index(files[1])
    assert chat["error"] == "ValueError: chat: message 0 must be a dict with a 'role', got 1"
    assert empty["error"] == "ValueError: generate: prompt 1 is empty; give at least one token"
    assert answered["finish_reason"] in ("stop", "length") and answered["id"] == "\ud800"
    assert "3 answers, of which 2 errors, " in capsys.readouterr().err
    files[1].unlink()
    files[0].write_text("[5]\n")
    assert run(files, "--system", "Be kind") == 0
    assert "after --system must be a text" in by_index(files[1])[0]["error"]


@pytest.mark.slow
def test_samples_that_fail_are_one_answer(files, monkeypatch):
    generate_iter = fdjax.LM.generate_iter

    def failing(lm, prompts, **options):
        for answer in generate_iter(lm, prompts, **options):
            yield dataclasses.replace(answer, error=FloatingPointError("not finite"))

    monkeypatch.setattr(fdjax.LM, "generate_iter", failing)
    files[0].write_text('"Hello"\n[7]\n')
    assert run(files, "--num-return-sequences", "2", "--temperature", "1") == 0
    errors = [answer["error"] for answer in by_index(files[1])]
    assert errors == ["FloatingPointError: not finite"] * 2


def test_ctrl_c_says_how_to_go_on(files, capsys, monkeypatch):
    generate_iter = fdjax.LM.generate_iter

    def interrupted(lm, prompts, **options):
        yield next(generate_iter(lm, prompts, **options))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fdjax.LM, "generate_iter", interrupted)
        assert run(files) == 130
    assert "\n1 of 4 prompts have an answer; the same command goes on\n" in capsys.readouterr().err
    assert run(files) == 0
    by_index(files[1])


@pytest.mark.slow
def test_samples_stand_together(files):
    options = [
        "--num-return-sequences",
        "2",
        "--temperature",
        "1",
        "--logprobs",
        "1",
        "--seed",
        "1",
    ]
    assert run(files, *options) == 0
    for answer in by_index(files[1]):
        assert len(answer["samples"]) == 2
        for sample in answer["samples"]:
            assert len(sample["logprobs"]) == len(sample["tokens"]) == len(sample["top_logprobs"])


def test_arguments_that_do_not_go_together(files, capsys):
    assert main(["generate", "--input", str(files[0])]) == 2
    assert run(files, "a prompt") == 2
    assert main(["generate", "--input", "absent.jsonl", "--output", str(files[1])]) == 2
    assert "absent.jsonl: No such file" in capsys.readouterr().err
    assert main(["generate", "--input", str(files[0]), "--output", "/absent/out"]) == 2
    assert "/absent/out: No such file" in capsys.readouterr().err
    assert main(["generate", "--input", str(files[0]), "--output", "."]) == 2
    assert ".: not a file" in capsys.readouterr().err
    assert main(["generate", "--input", str(files[0]), "--output", os.devnull]) == 2
    assert f"{os.devnull}: not a file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ("--num-return-sequences 2", 2, "needs a --temperature above 0"),
        ("--num-beams 2 --num-return-sequences 3", 2, "must be at most num_beams (2), got 3"),
        ("--table absent.json", 1, "absent.json"),
        ("--tensor-parallel 3", 1, "tensor_parallel"),
        ("--tensor-parallel 2", 1, "tensor_parallel needs 2 devices"),
    ],
)
def test_options_are_checked_first(files, capsys, tmp_path, monkeypatch, options, code, message):
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    monkeypatch.setattr(fdjax, "load", pytest.fail)
    assert run(files, *options.split()) == code
    assert message in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == [files[0]]


def test_a_run_that_fails_at_once_leaves_no_files(files, capsys, tmp_path):
    too_many = "--num-beams", "64"
    assert run(files, *too_many) == 1
    assert "64 must be at most the 32 rows that run at once" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == [files[0]]
    files[1].touch()  # somebody else's file stays
    assert run(files, *too_many) == 1
    assert files[1].exists()


def test_an_output_that_cannot_be_is_found_before_a_file_is_made(files, capsys, tmp_path):
    long = tmp_path / ("x" * 300)
    assert run((files[0], long)) == run((long, files[1])) == 2
    assert capsys.readouterr().err.count(f"put {long}: File name too long") == 2
    long = tmp_path / ("x" * 250)  # no room for the settings beside it
    assert run((files[0], long)) == 2
    assert f"--output {long}.run.json: File name too long" in capsys.readouterr().err
    (tmp_path / "out.jsonl.run.json").mkdir()
    assert run(files) == 2
    assert "out.jsonl.run.json: not a file" in capsys.readouterr().err
    assert not long.exists() and not files[1].exists()


def kill_and_resume(files, model, kills, prompts):
    source, target = files
    source.write_text("".join(json.dumps([i % 90 + 5, 7]) + "\n" for i in range(prompts)))
    command = [sys.executable, "-m", "fdjax", "generate", "--input", str(source)]
    command += ["--output", str(target), "--max-new-tokens", "30", "--model", model]
    for kill in range(kills):
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        lines = target.read_bytes().count(b"\n") if target.exists() else 0
        until = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < until:
            if target.exists() and target.read_bytes().count(b"\n") > lines + 7 * kill:
                break
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0
    assert len(by_index(target)) == prompts


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize(
    ("kills", "prompts"),
    [
        pytest.param(1, 30, marks=pytest.mark.slow),
        pytest.param(20, 1500, marks=pytest.mark.soak),
    ],
)
def test_killed_at_any_time_every_answer_is_there_once(files, two_layers, kills, prompts):
    kill_and_resume(files, two_layers, kills, prompts)
