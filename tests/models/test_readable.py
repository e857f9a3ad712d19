"""Messages that hold what files hold."""

import pytest

from fdjax.models import CheckpointError
from fdjax.models.readable import readable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "config.json: \N{EN DASH} \N{SNOWMAN} as it is",
            "config.json: \N{EN DASH} \N{SNOWMAN} as it is",
        ),
        ("clear\x1b[2J\r\n", r"clear\x1b[2J\r\n"),
        ("left\u202eright \ud800", r"left\u202eright \ud800"),
        ("", ""),
    ],
)
def test_only_what_changes_a_terminal_is_escaped(text, shown):
    assert readable(text) == readable(ValueError(text)) == shown
    assert str(CheckpointError(text)) == shown


def test_a_long_message_loses_its_middle():
    assert readable("x" * 900) == "x" * 900
    shown = readable("file: " + "x" * 10**5 + "; download it again")
    assert shown.startswith("file: xxx") and shown.endswith("xxx; download it again")
    assert "[... 99125 characters ...]" in shown and len(shown) < 1000
