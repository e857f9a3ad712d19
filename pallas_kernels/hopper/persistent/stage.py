"""A stage of a persistent kernel."""

import abc

from jax import Array

from fdjax.pallas_kernels.hopper.persistent.block import Block, Layer, Pair, Work
from fdjax.pallas_kernels.hopper.persistent.row_input import RowInput


class Stage(Work, abc.ABC):
    """The work of all blocks between two barriers, with one method for each warpgroup."""

    @abc.abstractmethod
    def bring_weights(
        self, block: Block, layer: Layer, worked: Array | None, tiles: Pair
    ) -> tuple[Array, Pair]:
        """Fill the ring with tiles that do not depend on the previous stage.

        Args:
          worked: argument of `Block.await_done`, which must be called before all but the first
            `config.ahead` tiles.
          tiles: (tiles requested, tiles waited for) since the kernel began.

        Returns:
          (number of tiles that this stage requested, updated `tiles`).
        """

    @abc.abstractmethod
    def bring_x(self, block: Block, layer: Layer, loaded: Array) -> Array:
        """Load the results of earlier stages as bricks; `loaded` counts them since the start."""

    @abc.abstractmethod
    def row_input(self, block: Block) -> RowInput:
        """What `bring_x` loads, if it comes in words."""

    @abc.abstractmethod
    def compute(self, block: Block, layer: Layer, used: Pair) -> Pair:
        """Compute the stage; `used` counts tiles of the ring and bricks of x since the start.

        Several warpgroups may do so at once: see `Block.index`.
        """
