"""How persistent kernels hold activations beside quantised weights."""

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Coding:
    """How a brick of columns of x is held, and multiplied by bricks of a weight.

    A brick is int32 words [places, words]. A row takes some successive places.

    Attributes:
      words: words of a place.
      of_row: places of a row.
      places: function of a number of rows: number of places for them.
      place: function of a row: its first place.
      coded: function of x [M,K] that returns [K/64, places, words], outside of a kernel.
      put: function that stores bricks of columns into shared memory, see `digits.put_digits`.
      multiplied: function that adds products, see `digits.multiplied_digits`.
    """

    words: int
    of_row: int
    places: Callable[[int], int]
    place: Callable[[Any], Any]
    coded: Callable[..., Any]
    put: Callable[..., None]
    multiplied: Callable[..., Any]
