"""Every test is in exactly one part, beside the other cases of its function."""

import pytest

from marks import in_part

NAMES = ["a.py::test_x", "a.py::test_y[1]", "a.py::test_y[2]", "a.py::test_z", "b.py::test_x[[0]]"]


@pytest.mark.parametrize("parts", [1, 2, 3, 9])
def test_parts_are_the_whole(parts):
    found = [in_part(NAMES, part, parts) for part in range(1, parts + 1)]
    assert [sum(of_test) for of_test in zip(*found, strict=True)] == [1] * len(NAMES)
    assert all(kept[1] == kept[2] for kept in found)


def test_functions_take_turns():
    assert in_part(NAMES, 2, 2) == [False, True, True, False, True]
