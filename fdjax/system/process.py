"""What a process must allow for JAX: transfers between host and device, and no fork after use."""

import functools
import os

import jax

# The process in which fdjax first ran anything.
_first_pid: int | None = None


def refuse_forked() -> None:
    """Raise RuntimeError in a process that was forked from one that had called this.

    JAX runs threads, which a forked process does not have: it would wait for them for ever.
    """
    global _first_pid
    if _first_pid is None:
        _first_pid = os.getpid()
    if _first_pid != os.getpid():
        raise RuntimeError(
            "fdjax: this process was forked after fdjax had been used, and JAX would hang in it; "
            "start it by 'spawn', as in multiprocessing.get_context('spawn'), and load there"
        )


# Decorates functions and opens `with` blocks whose transfers are meant, whatever the user's
# `jax_transfer_guard` says of others.
transfers_allowed = functools.partial(jax.transfer_guard, "allow")
