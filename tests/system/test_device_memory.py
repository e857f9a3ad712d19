"""The memory of a device."""

import jax.numpy as jnp
import numpy as np

from fdjax.system.device_memory import free


def test_free_deletes_arrays_of_devices_once():
    array, host = jnp.zeros(3), np.zeros(3)
    for _ in range(2):
        free({"array": array, "more": [host, None]})
    assert array.is_deleted() and host.shape == (3,)
