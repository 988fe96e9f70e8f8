"""Compares the runs of the demo and prints what came out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from .distributed import RankRun, Traffic
from .text import Text
from .train import Run, Settings

# Largest relative difference of a loss between BF16 rows and FP32 throughout. Rounding changes
# now and then which experts a token prefers, so the two drift apart; compared is what comes before.
TOLERANCE = 0.02
_NUM_FP32_STEPS = 100


@dataclass(frozen=True)
class Comparison:
    """How far the runs agree.

    Attributes:
        differing: what is not bit-equal between the ranks and the one process; must be empty.
        fp32_difference: largest relative difference of one of the first 100 losses to the FP32
            run's; at most TOLERANCE.
    """

    differing: list[str]
    fp32_difference: float

    @property
    def agrees(self) -> bool:
        """Whether the demo passes."""
        return not self.differing and self.fp32_difference <= TOLERANCE


def compare(rank_runs: Sequence[RankRun], rounded: Run, exact: Run) -> Comparison:
    """Compares what the ranks computed with both runs in one process."""
    differing: list[str] = []
    for idx, rank_run in enumerate(rank_runs):
        run = rank_run.run
        if run.first_outputs != [rounded.first_outputs[idx]]:
            differing.append(f"rank {idx}: output of the first expert layer in the first step")
        for step, (loss, expected) in enumerate(zip(run.losses, rounded.losses, strict=True)):
            if loss != expected:
                differing.append(f"rank {idx}: loss of step {step}: {loss} instead of {expected}")
                break
        differing += [
            f"rank {idx}: last weights of {part}"
            for part, digest in run.weights.items()
            if rounded.weights[part] != digest
        ]
    pairs = list(zip(rank_runs[0].run.losses, exact.losses, strict=True))[:_NUM_FP32_STEPS]
    return Comparison(differing, max(abs(loss - other) / abs(other) for loss, other in pairs))


def describe(settings: Settings, text: Text) -> str:
    """What is about to happen."""
    shape = settings.shape
    return (
        f"text     {text.source}\n"
        f"model    bytes, context {shape.context}, hidden {shape.hidden}, "
        f"{shape.num_layers} layers "
        f"of attention and {shape.num_experts} experts, top {shape.num_topk}\n"
        f"training {settings.num_steps} steps of {settings.num_tokens} tokens; experts and batch "
        f"spread over {settings.num_ranks} ranks\n"
    )


def to_table(
    settings: Settings,
    rank_runs: Sequence[RankRun],
    rounded: Run,
    exact: Run,
    comparison: Comparison,
) -> str:
    """Loss curves, speed and the checked result."""
    ranks = rank_runs[0].run
    name = f"{settings.num_ranks} ranks"
    lines = ["", f"{'loss at step':<14}{name:>12}{'one process':>14}{'FP32':>12}"]
    num_steps = settings.num_steps
    for step in sorted({*range(0, num_steps, max(1, num_steps // 5)), num_steps - 1}):
        columns = (
            f"{ranks.losses[step]:>12.6f}{rounded.losses[step]:>14.6f}{exact.losses[step]:>12.6f}"
        )
        lines.append(f"{step:>12}  {columns}")
    columns = "".join(
        f"{run.tokens_per_second(settings.num_tokens):>{width},.0f}"
        for run, width in ((ranks, 12), (rounded, 14), (exact, 12))
    )
    lines += [f"{'tokens/s':<14}{columns}", ""]
    lines.append(f"{'a rank':<14}{'calls':>12}{'MB a call':>14}{'ms a call':>12}{'GB/s':>10}")
    for operation, traffic in _mean_traffic(rank_runs).items():
        calls = traffic.num_calls
        lines.append(
            f"{operation:<14}{calls:>12}{traffic.num_bytes / calls / 1e6:>14.3f}"
            f"{traffic.seconds / calls * 1e3:>12.3f}{_gbps(traffic):>10.2f}"
        )
    lines += [
        "(forward and backward, with the waiting for other ranks; `bench` has the exchange alone)",
        "",
        *_verdict(settings, comparison),
    ]
    return "\n".join(lines)


def _verdict(settings: Settings, comparison: Comparison) -> list[str]:
    lines = []
    if comparison.differing:
        lines.append("NOT bit-equal to one process:")
        lines += [f"  {what}" for what in comparison.differing[:8]]
        if len(comparison.differing) > 8:
            lines.append(f"  and {len(comparison.differing) - 8} more")
    else:
        lines.append(
            f"bit-equal to one process: all {settings.num_steps} losses, the output of the first "
            "expert layer, all weights after the last step"
        )
    within = "within" if comparison.fp32_difference <= TOLERANCE else "NOT within"
    lines += [
        f"{within} {TOLERANCE:g} of FP32: "
        f"the first {min(settings.num_steps, _NUM_FP32_STEPS)} losses differ by "
        f"{comparison.fp32_difference:.1e} at most; rows travel in BF16",
        "agrees" if comparison.agrees else "DOES NOT AGREE",
    ]
    return lines


def to_json(
    settings: Settings,
    text: Text,
    rank_runs: Sequence[RankRun],
    rounded: Run,
    exact: Run,
    comparison: Comparison,
) -> str:
    """The same on one line."""
    traffic = _mean_traffic(rank_runs)
    return json.dumps(
        {
            "ranks": settings.num_ranks,
            "steps": settings.num_steps,
            "text": text.source,
            "losses": rank_runs[0].run.losses,
            "one_process_losses": rounded.losses,
            "fp32_losses": exact.losses,
            "tokens_per_s": rank_runs[0].run.tokens_per_second(settings.num_tokens),
            "one_process_tokens_per_s": rounded.tokens_per_second(settings.num_tokens),
            "dispatch_gbps": _gbps(traffic["dispatch"]),
            "combine_gbps": _gbps(traffic["combine"]),
            "differing": comparison.differing,
            "fp32_difference": comparison.fp32_difference,
            "fp32_tolerance": TOLERANCE,
            "agrees": comparison.agrees,
        }
    )


def _mean_traffic(rank_runs: Sequence[RankRun]) -> dict[str, Traffic]:
    def mean(of_ranks: Sequence[Traffic]) -> Traffic:
        num_bytes = sum(traffic.num_bytes for traffic in of_ranks) // len(of_ranks)
        seconds = sum(traffic.seconds for traffic in of_ranks) / len(of_ranks)
        return Traffic(of_ranks[0].num_calls, num_bytes, seconds)

    return {
        "dispatch": mean([run.dispatch for run in rank_runs]),
        "combine": mean([run.combine for run in rank_runs]),
    }


def _gbps(traffic: Traffic) -> float:
    return traffic.num_bytes / traffic.seconds / 1e9
