"""`fdjax doctor`: what is missing for a GPU."""

import argparse
import json

from fdjax.cli.arguments import Parser

HELP = "versions, devices, and what is missing for a GPU"
DESCRIPTION = (
    "Say what fdjax runs on and what is missing for a GPU to be used well. Exit "
    "code 1 if there is something to mend."
)


def add_arguments(parser: Parser) -> None:
    """What it takes."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Run it; the exit code."""
    from fdjax.tools.doctor import diagnose

    diagnosis = diagnose()
    print(json.dumps(diagnosis.asdict()) if args.json else diagnosis)
    return int(not diagnosis.sound)
