"""Pipeline schedules as data: built by name or read from a file, checked, simulated, drawn.

No torch.
"""

from shardwright.schedule.actions import KINDS, Action, Kind, Schedule, folded, forward_only, looped
from shardwright.schedule.check import Proof, check, peak_activations
from shardwright.schedule.families import (
    FAMILIES,
    Family,
    build_schedule,
    load_schedule,
    rank_of_stage,
    read_file,
    splits_backward,
    stages_per_rank,
)
from shardwright.schedule.simulate import Timeline, Times, seconds_of_step, simulate
from shardwright.schedule.text import parse_schedule, read_schedule, write_schedule
from shardwright.schedule.transfers import Step, Transfer, plan_steps

__all__ = [
    "FAMILIES",
    "KINDS",
    "Action",
    "Family",
    "Kind",
    "Proof",
    "Schedule",
    "Step",
    "Timeline",
    "Times",
    "Transfer",
    "build_schedule",
    "check",
    "folded",
    "forward_only",
    "load_schedule",
    "looped",
    "parse_schedule",
    "peak_activations",
    "plan_steps",
    "rank_of_stage",
    "read_file",
    "read_schedule",
    "seconds_of_step",
    "simulate",
    "splits_backward",
    "stages_per_rank",
    "write_schedule",
]
