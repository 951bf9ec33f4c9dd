"""Pipeline schedules as data: built by name or read from a file, checked, simulated, drawn.

No torch.
"""

from shardwright.schedule.actions import (
    ACTION_KINDS,
    Action,
    ActionKind,
    Schedule,
    assign_folded_stages,
    assign_looped_stages,
    build_forward_only,
)
from shardwright.schedule.communication_graph import CommunicationGraph, build_communication_graph
from shardwright.schedule.registry import (
    PIPELINE_SCHEDULES,
    ScheduleFamily,
    assign_stages,
    build_schedule,
    count_micro_batches,
    count_stages_per_rank,
    has_split_backward,
    load_schedule,
    load_schedule_file,
)
from shardwright.schedule.simulation import ActionTimes, Timeline, simulate, simulate_step_seconds
from shardwright.schedule.text_format import parse_schedule, read_schedule, write_schedule
from shardwright.schedule.transfers import (
    Channel,
    ScheduleStep,
    Transfer,
    assign_channel_groups,
    plan_steps,
)
from shardwright.schedule.validation import (
    ScheduleStatistics,
    check_schedule,
    count_peak_activations,
)
