"""`python -m deep_ep`: the demo and the benchmark."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from deep_ep.bench import cli as bench
from deep_ep.demo import cli as demo

_COMMANDS = {
    "demo": (demo, "train a small MoE model over ranks and in one process, and compare"),
    "bench": (bench, "measure dispatch and combine against this machine and torch.distributed"),
}

# What `deep_ep` itself does without.
_OPTIONAL_MODULES = ("numpy", "torch", "tqdm")


def make_parser() -> argparse.ArgumentParser:
    """The command line of all subcommands."""
    parser = argparse.ArgumentParser(prog="python -m deep_ep", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, (command, summary) in _COMMANDS.items():
        subparser = commands.add_parser(name, help=summary, description=command.__doc__)
        command.add_arguments(subparser)
        subparser.set_defaults(parser=subparser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand.

    Returns:
        The exit status: 0, 1 for a failure, 130 for Ctrl-C. Bad arguments end the program with 2.
    """
    args = make_parser().parse_args(argv)
    command, _ = _COMMANDS[args.command]
    try:
        command.check_arguments(args)
    except ValueError as error:
        args.parser.error(str(error))
    try:
        return command.run(args)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except ModuleNotFoundError as error:
        if error.name not in _OPTIONAL_MODULES:
            raise
        print(
            f"error: {args.command} needs {error.name}: pip install {error.name}", file=sys.stderr
        )
        return 1
    except (RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
