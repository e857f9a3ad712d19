"""`fdjax doctor`: reports what is missing to use a GPU."""

import argparse
import json

from fdjax.cli.arguments import Parser

HELP = "versions, devices, and what is missing for a GPU"
DESCRIPTION = (
    "Report what fdjax runs on and what is missing to use a GPU well. The exit code is 1 if there "
    "is a problem."
)


def add_arguments(parser: Parser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    from fdjax.tools.doctor import diagnose

    diagnosis = diagnose()
    print(json.dumps(diagnosis.asdict()) if args.json else diagnosis)
    return int(not diagnosis.sound)
