"""`fdjax chat`: talk with a model."""

import argparse
from pathlib import Path

from fdjax.cli.arguments import Parser, utf8_text
from fdjax.cli.shared import (
    add_model,
    add_sampling,
    load_model,
    read_text,
    sampling_of,
    with_room,
)

HELP = "talk with a model"
DESCRIPTION = (
    "Talk with a model, which must have a chat template. Each line is a message, and the model "
    "sees all messages before it. Lines may be piped in. "
    '""" begins and ends a message of several lines. '
    "/system sets the system message, /reset forgets the conversation, /save writes it to a file, "
    "/help lists the commands, /quit or the end of the input leaves, Ctrl-C stops an answer."
)
# Limit for answers that do not end by themselves.
CHAT_TOKENS = 1024


def add_arguments(parser: Parser) -> None:
    """Add the arguments of the command."""
    add_model(parser)
    parser.add_argument(
        "--system", type=utf8_text, metavar="TEXT", help="a system message to begin with"
    )
    parser.add_argument(
        "--chat-template", metavar="T", help="a Jinja file, or the name of a template of the model"
    )
    add_sampling(parser, f"default: {CHAT_TOKENS}", streams=True)


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    from fdjax.cli.chat_loop import Conversation, talk

    template = args.chat_template
    if template is not None and Path(template).is_file():
        template = read_text(Path(template))
    options = {"max_new_tokens": CHAT_TOKENS} | with_room(sampling_of(args), CHAT_TOKENS)
    lm = load_model(args)
    talk(Conversation(lm, system=args.system, chat_template=template, **options))
    return 0
