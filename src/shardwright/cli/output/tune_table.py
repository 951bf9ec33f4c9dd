"""Table of tuning: predicted against measured settings, and lines about trials as they end."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from shardwright.cli.output.console import print_table
from shardwright.hardware import Cluster
from shardwright.tuning.candidates import CandidateList, TuningCandidate
from shardwright.tuning.halving import Trial
from shardwright.tuning.tuning_result import TriedCandidate, TuningResult
from shardwright.units import GIB_BYTES, format_bytes, format_count, format_seconds

_STATUS_NAMES = {
    "out_of_memory": "out of memory",
    "failed": "failed",
    "refused": "not possible",
    "time_limit": "too slow",
}
_COMPILE_SECONDS = 5.0
"""Warm-up from which it is worth a note: kernels were compiled."""


class TrialPrinter:
    """Prints a line when the search starts, and one for each trial."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._num_candidates = 0

    def print_start(self, candidates: CandidateList, cluster: Cluster) -> None:
        """Print how many candidates there are, and the source of the predictions."""
        self._num_candidates = len(candidates.candidates)
        self._console.print(
            f"{self._num_candidates} candidates of {candidates.num_overlapping} whose predicted "
            f"interval overlaps that of the fastest on {cluster.name} ({cluster.rates_source})"
        )
        if cluster.accelerator.kind == "cpu" and cluster.profile is None:
            self._console.print(
                "the predictions use no measured rates; for better candidates, measure this "
                "machine (doctor --calibrate), then set --cluster and --profile"
            )
        if candidates.baseline_obstacle is not None:
            self._console.print(
                f"the recipe's own settings are not tried: {candidates.baseline_obstacle}"
            )

    def print_trial(self, candidate: TuningCandidate, trial: Trial) -> None:
        """Print the outcome of a trial."""
        outcome = trial.outcome
        measured = outcome.measurement
        if measured is None:
            text = f"{_STATUS_NAMES[outcome.status]}: {outcome.reason}"
        else:
            text = (
                f"{_format_measured(measured.step_seconds, measured.spread_seconds)} per step, "
                f"predicted {format_seconds(candidate.prediction.time.step)}"
            )
        source = f"{format_seconds(outcome.seconds)}" if trial.is_new else "earlier result"
        self._console.print(f"{trial.num_steps} steps of {candidate.describe()}: {text} ({source})")


def print_result(result: TuningResult, console: Console) -> None:
    """Print the table, the winner and the files."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), title_justify="left")
    table.add_column("", no_wrap=True)
    table.add_column("settings", overflow="fold", ratio=1)
    for name in ("predicted", "80% interval", "measured", "tok/s", "GiB pred.", "GiB", "steps"):
        table.add_column(name, justify="right", overflow="fold")
    for tried in result.tried:
        style = "bold green" if tried is result.winner else None
        table.add_row(*_build_row(tried, is_winner=tried is result.winner), style=style)
    print_table(console, table)
    console.print("*: fastest; =: the recipe's own settings")
    for tried in result.tried:
        outcome = tried.outcome
        if outcome is not None and outcome.measurement is None:
            name = _STATUS_NAMES[outcome.status]
            console.print(f"{name}: {tried.candidate.describe()}: {outcome.reason}")
        if (tried.first_warmup_seconds or 0.0) > _COMPILE_SECONDS:
            console.print(
                f"warm-up of {tried.candidate.describe()}: "
                f"{format_seconds(tried.first_warmup_seconds or 0.0)}, mostly compilation"
            )
    if result.cluster.accelerator.kind == "cpu":
        console.print(
            "memory on a CPU: measured is the resident process with its libraries, predicted its "
            "tensors"
        )
    _print_ending(result, console)


def _build_row(tried: TriedCandidate, *, is_winner: bool) -> list[str]:
    prediction = tried.candidate.prediction
    mark = ("*" if is_winner else "") + ("=" if tried.candidate.is_baseline else "")
    low, high = prediction.step_interval
    row = [
        mark,
        tried.candidate.describe(),
        format_seconds(prediction.time.step),
        f"{format_seconds(low)} to {format_seconds(high)}",
    ]
    memory = f"{prediction.memory.total / GIB_BYTES:.1f}"
    measured = tried.measurement
    if measured is None:
        status = "not tried" if tried.outcome is None else _STATUS_NAMES[tried.outcome.status]
        return [*row, status, "", memory, "", ""]
    return [
        *row,
        _format_measured(measured.step_seconds, measured.spread_seconds),
        format_count(measured.tokens_per_second),
        memory,
        f"{measured.memory_bytes / GIB_BYTES:.1f}",
        str(measured.num_steps),
    ]


def _print_ending(result: TuningResult, console: Console) -> None:
    untried = sum(tried.outcome is None for tried in result.tried)
    summary = f"{result.num_trials} trials in {format_seconds(result.seconds)}"
    if result.ending == "budget":
        summary += f"; the budget ended the search with {untried} candidates not tried"
    console.print(summary)
    winner = result.winner
    if winner is not None and winner.measurement is not None and result.ending != "stopped":
        measured = winner.measurement
        text = (
            f"fastest: {winner.candidate.describe()}: "
            f"{format_count(measured.tokens_per_second)} tokens/s, "
            f"{format_bytes(measured.memory_bytes)} per rank"
        )
        if winner.candidate.is_baseline:
            text += ", the recipe's own settings"
        elif result.speedup is not None:
            text += f", {result.speedup:.2f} times as fast as the recipe's own settings"
        console.print(text, style="green")
        console.print(f"recipe: {result.recipe_path}", soft_wrap=True)
    if result.profile_path is not None:
        console.print(
            f"later plans for {result.cluster.name} use these step times: {result.profile_path}",
            soft_wrap=True,
        )
    if result.profile_problem is not None:
        console.print(
            f"warning: the step times are not saved for later plans: {result.profile_problem}",
            style="yellow",
        )


def _format_measured(seconds: float, spread_seconds: float) -> str:
    """Format a median with its spread as a percentage.

    >>> _format_measured(2.0, 0.05)
    '2.0 s ±2%'
    """
    return f"{format_seconds(seconds)} ±{spread_seconds / seconds:.0%}"
