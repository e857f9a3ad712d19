"""Makes a process fit for JAX: allows transfers, and refuses a fork after use."""

import functools
import os

import jax

# The process that first used fdjax.
_first_pid: int | None = None


def refuse_forked() -> None:
    """Raise RuntimeError if the parent process called this before it forked the present one.

    JAX runs threads. A forked process does not have them and would wait for them forever.
    """
    global _first_pid
    if _first_pid is None:
        _first_pid = os.getpid()
    if _first_pid != os.getpid():
        raise RuntimeError(
            "fdjax: this process was forked after fdjax had been used, and JAX would hang in it; "
            "start it by 'spawn', as in multiprocessing.get_context('spawn'), and load there"
        )


# Allows transfers in a decorated function or a `with` block, whatever the user's setting of
# `jax_transfer_guard`.
transfers_allowed = functools.partial(jax.transfer_guard, "allow")
