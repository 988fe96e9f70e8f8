"""`python -m deep_ep demo`: runs the training three times, compares, and prints what came out."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .report import Comparison


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the demo's arguments."""
    parser.add_argument(
        "--ranks", type=int, help="processes that share the experts (default: the cores, 2 to 4)"
    )
    parser.add_argument("--steps", type=int, default=100, help="training steps (default: 100)")
    parser.add_argument("--json", action="store_true", help="print one JSON object, no table")
    parser.add_argument(
        "--inject-error",
        type=int,
        metavar="STEP",
        help="give the experts rows of the wrong tokens in this step; the comparison must fail",
    )


def check_arguments(args: argparse.Namespace) -> None:
    """Raises ValueError for values that make no sense."""
    if args.ranks is not None and not 1 <= args.ranks <= 64:
        raise ValueError(f"--ranks must be 1 to 64, got {args.ranks}")
    if args.steps < 1:
        raise ValueError(f"--steps must be at least 1, got {args.steps}")
    if args.inject_error is not None and not 0 <= args.inject_error < args.steps:
        raise ValueError(f"--inject-error must be one of the {args.steps} steps")


def run(args: argparse.Namespace) -> int:
    """Trains, compares and prints. Returns the exit status: 1 when the runs do not agree."""
    from tqdm import tqdm

    from deep_ep.bench.ranks import num_cores

    from . import report, runs, text

    num_ranks = args.ranks or min(4, max(2, num_cores()))
    settings = runs.make_settings(num_ranks, args.steps)
    learned = text.load_text()
    if not args.json:
        print(report.describe(settings, learned), flush=True)

    def bar(name: str) -> tqdm:
        return tqdm(total=args.steps, desc=f"{name:<34}", unit="step", disable=args.json)

    with bar(f"{num_ranks} ranks, dispatch and combine") as progress:
        rank_runs = runs.over_ranks(settings, args.inject_error, progress)
    with bar("one process, same roundings") as progress:
        rounded = runs.in_one_process(settings, learned, progress)
    with bar("one process, FP32, whole batches") as progress:
        exact = runs.in_fp32(settings, learned, progress)

    comparison: Comparison = report.compare(rank_runs, rounded, exact)
    if args.json:
        print(report.to_json(settings, learned, rank_runs, rounded, exact, comparison))
    else:
        print(report.to_table(settings, rank_runs, rounded, exact, comparison))
    return 0 if comparison.agrees else 1
