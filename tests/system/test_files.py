"""Files are written as a whole or not at all."""

import argparse
import errno
import importlib
import os
from pathlib import Path

import pytest

import benchmarks
from fdjax.bench import __main__ as bench
from fdjax.bench import record, suite
from fdjax.system import files
from fdjax.system.files import write_whole
from fdjax.tools.tune_table import write_table

RECORD = record.Record({}, {}, {})
WRITERS = {
    "text": lambda path: write_whole(path, "new"),
    "table": lambda path: write_table({"schema": 1, "entries": [{"op": "matmul"}]}, path),
    "record": lambda path: record.write(RECORD, path),
}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "no space left")])
@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_what_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, write, error):
    def write_text(self, text, **options):
        with self.open("w") as file:
            file.write(text[:2])
        raise error

    path = tmp_path / "new folder" / "file.json"
    write(path)
    path.write_text("old")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", write_text)
        with pytest.raises(type(error)):
            write(path)
    assert [p.name for p in path.parent.iterdir()] == ["file.json"]
    assert path.read_text() == "old"
    write(path)
    assert path.read_text() != "old"


def test_what_is_no_plain_file_stays_what_it_is(tmp_path):
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(tmp_path / "file")
    write_whole(link, "text")
    assert link.is_symlink() and (tmp_path / "file").read_text() == "text"
    os.mkfifo(pipe)
    with os.fdopen(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)) as reader:
        write_whole(pipe, "text")
        assert reader.read() == "text"
    assert pipe.is_fifo()
    read, write = os.pipe()
    write_whole(f"/dev/fd/{write}", "text")
    assert os.read(read, 9) == b"text"
    os.close(read)
    os.close(write)


@pytest.mark.parametrize("module", ["suite", "__main__"])
def test_a_folder_is_refused_before_anything_is_measured(module, tmp_path, capsys):
    parse = {"suite": suite.parse_args, "__main__": lambda argv: bench.main(["ceiling", *argv])}
    with pytest.raises(SystemExit) as stop:
        parse[module](["--output", str(tmp_path)])
    assert stop.value.code == 2
    assert f"argument --output: {tmp_path} is a directory" in capsys.readouterr().err


def test_an_output_is_checked_and_not_made(tmp_path):
    (tmp_path / "file").write_text("")
    for name in ("new", "file", "a/b/new"):
        assert files.output_file(str(tmp_path / name)) == tmp_path / name
    assert files.output_file(os.devnull) == Path(os.devnull)
    for name in ("file/new", "file/a/new", "."):
        with pytest.raises(argparse.ArgumentTypeError):
            files.output_file(str(tmp_path / name))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_every_benchmark_refuses_a_folder(tmp_path, capsys):
    """Of every script that writes a file, and not a folder."""
    folders = {"headline", "kernels", "plots"}
    found = 0
    for path in sorted(Path(benchmarks.__file__).parent.glob("*.py")):
        if path.stem in folders or '"--output"' not in path.read_text():
            continue
        module = importlib.import_module(f"benchmarks.{path.stem}")
        with pytest.raises(SystemExit):
            module.parse_args(["--output", str(tmp_path)])
        assert f"{tmp_path} is a directory" in capsys.readouterr().err, path
        found += 1
    assert found >= 9
