"""Text that comes from files, as messages show it."""

# Longer messages lose their middle: the file is named at the beginning, the remedy at the end.
_BEGINNING, _END = 600, 300


def readable(message: object) -> str:
    """A message in one line that changes no terminal: control characters escaped, its middle cut.

    Args:
      message: what `str` makes a text of, such as an exception.
    """
    text = "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(message)
    )
    if len(text) <= _BEGINNING + _END:
        return text
    left_out = len(text) - _BEGINNING - _END
    return f"{text[:_BEGINNING]} [... {left_out} characters ...] {text[-_END:]}"
