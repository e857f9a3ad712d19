"""Files are written as a whole or not at all."""

import errno
import os
from pathlib import Path

import pytest

from fdjax.bench import record
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
