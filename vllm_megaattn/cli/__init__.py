"""The command line: `python -m vllm_megaattn COMMAND`.

A command is a module of this package with HELP (one line), `add_arguments(parser)` and `run(args) -> exit status`; it
is listed in COMMANDS and nowhere else. Exit status: 0 all well, 1 the command found a mismatch, 2 it could not run
(bad arguments, unreadable input, no usable device). Results go to stdout, progress and errors to stderr.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from vllm_megaattn._version import __version__

COMMANDS = ("demo", "info", "layout", "bench", "check")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_megaattn",
        description="MXFP8 output projection of DeepSeek-V4 / V4.1 attention.",
    )
    parser.add_argument("--version", action="version", version=f"vllm_megaattn {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = importlib.import_module(f"vllm_megaattn.cli.{name}")
        command = subparsers.add_parser(
            name, help=module.HELP, description=module.__doc__, formatter_class=_Formatter
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run, parser=command)
    return parser


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of a module's docstring and shows defaults."""


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        return args.run(args)
    except (ValueError, TypeError, KeyError, OSError, RuntimeError, ImportError) as error:
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        print(f"vllm_megaattn {args.command}: error: {text}", file=sys.stderr)
        return 2
