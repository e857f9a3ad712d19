"""All kernels compared with their peers, one record each: `python -m benchmarks.kernels`."""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SCRIPTS = ("matmul", "decode_attention", "prefill_attention")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scripts", nargs="+", choices=SCRIPTS, default=SCRIPTS)
    parser.add_argument("--only", default="", help="run only cases whose name contains this")
    parser.add_argument("--output", type=Path, help="folder for the records")
    parser.add_argument("--commit", help="commit to record if git cannot be asked")
    return parser.parse_args(argv)


def backend() -> str:
    """The platform JAX runs on, asked in a process that holds no GPU memory afterwards."""
    program = "import jax; print(jax.default_backend())"
    return subprocess.check_output([sys.executable, "-c", program], text=True).strip()


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if backend() != "gpu":
        print("kernels: needs an NVIDIA GPU, JAX sees none", file=sys.stderr)
        return 2
    failed = []
    for script in args.scripts:
        options = ["--only", args.only]
        if args.output:
            options += ["--output", str(args.output / f"{script}.json")]
        if args.commit:
            options += ["--commit", args.commit]
        print(f"== {script}", flush=True)
        # Each runs in its own process: an illegal access in one must not lose the others' records.
        if subprocess.run([sys.executable, "-m", f"benchmarks.{script}", *options]).returncode:
            failed.append(script)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
