"""Makes text from files safe to show in messages."""

# Longer messages lose their middle: the file is named at the beginning, the remedy at the end.
_BEGINNING, _END = 600, 300


def readable(message: object) -> str:
    """A message in one line, with control characters escaped and the middle of a long one cut.

    Args:
      message: an object that `str` converts, such as an exception.
    """
    text = "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(message)
    )
    if len(text) <= _BEGINNING + _END:
        return text
    left_out = len(text) - _BEGINNING - _END
    return f"{text[:_BEGINNING]} [... {left_out} characters ...] {text[-_END:]}"
