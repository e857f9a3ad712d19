"""A stage of a persistent kernel."""

import abc

from jax import Array

from fdjax.pallas_kernels.hopper.persistent.block import Block, Layer, Pair, Work


class Stage(Work, abc.ABC):
    """What all blocks do between two barriers; a method for each warpgroup of a block."""

    @abc.abstractmethod
    def bring_weights(
        self, block: Block, layer: Layer, worked: Array | None, tiles: Pair
    ) -> tuple[Array, Pair]:
        """Fill the ring with what does not depend on the stage before.

        Args:
          worked: for `Block.await_done`, which must precede all but the first `config.ahead` tiles.
          tiles: that were asked for, and that have been waited for, since the kernel began.

        Returns:
          (how many of this stage were asked for, tiles).
        """

    @abc.abstractmethod
    def bring_x(self, block: Block, layer: Layer, loaded: Array) -> Array:
        """Bring what the stage before has made, in bricks; `loaded` counts all since the start."""

    @abc.abstractmethod
    def compute(self, block: Block, layer: Layer, used: Pair) -> Pair:
        """Make results of both; `used` counts tiles of the ring and bricks of x since the start."""
