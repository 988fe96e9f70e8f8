"""`python -m deep_ep bench`: dispatch and combine on N ranks, one process each."""

from __future__ import annotations

import argparse
import shlex
import sys

_OPERATIONS = ("dispatch", "cached_dispatch", "combine", "combine_unlent")
_LAYOUTS = ("compact", "expanded")
_DTYPES = ("bf16", "fp8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the benchmark's arguments."""
    parser.add_argument(
        "--op",
        default=",".join(_OPERATIONS),
        help="comma-separated, default: %(default)s. cached: with the routing of an earlier call; "
        "unlent: with expert outputs outside the buffer's window",
    )
    parser.add_argument(
        "--layout", default=",".join(_LAYOUTS), help="compact, expanded or both (the default)"
    )
    parser.add_argument(
        "--dtype", default=",".join(_DTYPES), help="bf16, fp8 or both (the default)"
    )
    numbers = {
        "ranks": (2, "processes"),
        "tokens": (4096, "tokens of each rank"),
        "hidden": (7168, "elements of a token, a multiple of 8"),
        "topk": (8, "experts of a token"),
        "experts": (256, "experts of all ranks together"),
        "num-sms": (0, "worker threads of a rank; 0: the library chooses"),
        "iters": (30, "measured calls of each operation"),
    }
    for name, (default, text) in numbers.items():
        parser.add_argument(
            f"--{name}", type=int, default=default, help=f"{text} (default: {default})"
        )
    parser.add_argument("--device", choices=["cpu"], default="cpu", help="what runs the ranks")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object a line, no table"
    )


def check_arguments(args: argparse.Namespace) -> None:
    """Raises ValueError for values that make no sense, and splits the lists."""
    for name, known in (("op", _OPERATIONS), ("layout", _LAYOUTS), ("dtype", _DTYPES)):
        values = getattr(args, name).split(",")
        unknown = [value for value in values if value not in known]
        if unknown:
            raise ValueError(f"--{name}: no {unknown[0]!r} among {', '.join(known)}")
        setattr(args, name, values)
    for name in ("ranks", "tokens", "hidden", "topk", "experts", "iters"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.num_sms < 0:
        raise ValueError(f"--num-sms must not be negative, got {args.num_sms}")
    if args.experts % args.ranks != 0:
        raise ValueError(
            f"--experts must be a multiple of --ranks, got {args.experts} and {args.ranks}"
        )
    if args.topk > args.experts:
        raise ValueError(f"--topk must be at most --experts, got {args.topk} and {args.experts}")
    if args.hidden % 8 != 0:
        raise ValueError(f"--hidden must be a multiple of 8, got {args.hidden}")
    if "bf16" not in args.dtype and not any("dispatch" in op for op in args.op):
        raise ValueError("--dtype fp8 is for dispatch: combine takes bf16 only")


def run(args: argparse.Namespace) -> int:
    """Measures and prints. Returns the exit status."""
    from .measure import Memory, measure_on_rank
    from .ranks import num_cores, run_ranks
    from .report import Result, Shape, header, to_line

    shape = Shape(args.ranks, args.tokens, args.hidden, args.topk, args.experts, args.num_sms)
    if not args.json:
        command = shlex.join(["python", "-m", "deep_ep", *sys.argv[1:]])
        print(header(shape, command, num_cores(), args.iters), flush=True)

    def on_report(_: int, value: object) -> None:
        if isinstance(value, Result):
            line = value.to_json(shape, args.device) if args.json else to_line(value)
            print(line, flush=True)
        elif isinstance(value, Memory) and not args.json:
            print(f"\n{value.describe()}", flush=True)

    settings = (shape, args.op, args.layout, args.dtype, args.iters)
    run_ranks(measure_on_rank, args.ranks, settings, on_report)
    return 0
