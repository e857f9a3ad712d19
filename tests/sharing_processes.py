"""Runs a model that two processes share, each with one CPU device. Each prints a report.

    python tests/sharing_processes.py FUNCTION '[ARGUMENT, ..., {KEYWORDS}]' ADDRESS RANK

prints the result of a function below as JSON. `ADDRESS` is the host and port of process 0.
"""

import json
import os
import signal
import sys
import threading

import jax

from fdjax.engine import engine as engine_module
from fdjax.engine import memory, mesh
from fdjax.engine.watch import Watch
from fdjax.weights import checkpoint
from sharing_devices import OPTIONS, PROMPTS, load

_RANKS = 2
# The last answer is drawn with a seed that nobody gives, the others are greedy.
_MIXED = OPTIONS | {"do_sample": None, "temperature": [0.0, 0.0, 0.9]}
_GIGABYTE = 10**9


def answers(path, victim, sent):
    """What a model says, what this process read and holds of it, and what it refuses.

    It prints this report. Then it is as if `ends` had been called.
    """
    rank, cut, open_pool = jax.process_index(), [], engine_module.init_pool

    class Division(checkpoint.Division):
        def cut(self, array, path, source, rank, **options):
            cut.append(rank)
            return super().cut(array, path, source, rank, **options)

    def fragmented(*args):
        engine_module.init_pool = open_pool
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")

    checkpoint.Division = Division
    memory.free_memory_bytes = mesh.free_memory_bytes = lambda device: (7 - rank) * _GIGABYTE
    lm = load(path, _RANKS)
    first, second = (lm.generate(PROMPTS, **_MIXED) for _ in range(2))
    later = sorted(lm.generate_iter(PROMPTS, **_MIXED), key=lambda answer: answer.index)
    report = {
        "greedy": {"tokens": first.tokens[:-1], "logprobs": first.logprobs[:-1]},
        "drawn": [first.tokens[-1], second.tokens[-1]],
        "later": [answer.tokens for answer in later],
        "score": lm.score(PROMPTS).logprobs,
        "bytes": [lm._memory_bytes, lm.engine.place.free_memory_bytes()],
        "weight_bytes": lm.model.local.weight_bytes,
    }
    if rank == 1:
        engine_module.init_pool = fragmented
    lm.release()
    lm.engine._open_pool(64)
    report["pages"] = lm.engine.pool.count
    held = [leaf.addressable_shards for leaf in jax.tree.leaves(lm.params)]
    own = {
        "ranks": sorted({*cut}),
        "bytes": sum(shard.data.nbytes for shards in held for shard in shards),
    }
    print(json.dumps({"same": report, "own": own, "refused": _refused(lm, rank)}), flush=True)
    lm.engine.runner.aborted = False
    return _ended(lm, victim, sent)


def _refused(lm, rank):
    said = {}

    def attempt(name, function):
        try:
            function()
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"

    attempt("prompts", lambda: lm.generate([1, 2 + rank], max_new_tokens=2))
    attempt("options", lambda: lm.generate([1, 2], max_new_tokens=2 + rank))
    attempt("calls", lambda: lm.score([[1, 2]]) if rank else lm.generate([1, 2]))
    attempt("submit", lambda: lm.submit([1, 2]))
    thread = threading.Thread(target=attempt, args=("thread", lambda: lm.generate([1, 2])))
    thread.start()
    thread.join()
    lm.engine.watch = Watch()
    attempt("watch", lambda: lm.generate([1, 2]))
    lm.engine.watch = None
    lm.engine.runner.aborted = True
    attempt("aborted", lambda: lm.generate([1, 2]))
    return said


def ends(path, victim, sent):
    """Process `victim` sends itself a signal while it generates. The other reports its error."""
    return _ended(load(path, _RANKS), victim, sent)


def _ended(lm, victim, sent):
    def stop(tokens):
        if len(tokens) > 40 and jax.process_index() == victim:
            os.kill(os.getpid(), getattr(signal, sent))
        return False

    try:
        options = {"max_new_tokens": 100, "do_sample": False, "eos_token_id": None}
        lm.generate([1, 2, 3], stopping_criteria=[stop], **options)
    except jax.errors.JaxRuntimeError as error:
        return type(error).__name__
    return None


def main():
    function, arguments, address, rank = sys.argv[1:]
    jax.config.update("jax_disable_most_optimizations", True)
    seconds = 10  # until JAX notices that a process is gone
    timeouts = {"heartbeat_timeout_seconds": seconds, "shutdown_timeout_seconds": seconds}
    jax.distributed.initialize(address, _RANKS, int(rank), **timeouts)
    *arguments, options = json.loads(arguments)
    print(json.dumps(globals()[function](*arguments, **options)), flush=True)


if __name__ == "__main__":
    main()
