"""The training loop: steps, their events and their measurements."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from shardwright.data.loader import MicroBatch, read_step_micro_batches
from shardwright.data.sample_order import SampleOrder
from shardwright.layout import RankGrid
from shardwright.optim import compute_learning_rate
from shardwright.telemetry.meter import ThroughputMeter
from shardwright.training.checkpointing import RunCheckpointer
from shardwright.training.expert_load import ExpertLoadMonitor, ExpertLoads, read_expert_loads
from shardwright.training.preference_objective import PreferenceMetrics, PreferenceObjective
from shardwright.training.profiling import StepProfiler
from shardwright.training.rank_context import RankContext
from shardwright.training.rank_metrics import RankMetrics, RankStepTimes
from shardwright.training.rank_sync import StepSync
from shardwright.training.run_prediction import PredictionComparison, predict_training_run
from shardwright.training.setup import TrainingState
from shardwright.training.step import (
    StepUpdate,
    accumulate_gradients,
    count_tokens_and_flops,
    update_parameters,
)
from shardwright.training.step_policy import StepPolicy
from shardwright.watchdog.stragglers import build_straggler_detector


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step. Identical on all ranks except for the times."""

    loss: float
    update: StepUpdate
    learning_rate: float
    supervised_tokens: int
    tokens: int
    """Tokens that all ranks computed: supervised, unsupervised and padding."""
    flops_per_token: float
    """Mean FLOPs per token of the model; attention costs more in longer rows."""
    times: RankStepTimes
    """Times of this rank in seconds."""
    expert_loads: ExpertLoads | None
    """Expert loads. None for dense models."""
    preference_metrics: PreferenceMetrics | None = None
    """Mean rewards of the step's pairs. None without preference tuning."""


class TrainingLoop:
    """Training loop of one rank; `run` trains."""

    def __init__(
        self,
        context: RankContext,
        state: TrainingState,
        checkpointer: RunCheckpointer,
        matmul_flops_per_second: float,
    ) -> None:
        """
        Args:
            context: Context of this rank.
            state: Model, optimizer and counters that training changes.
            checkpointer: Saves and restores `state`.
            matmul_flops_per_second: Rate of one device, as measured by `measure_ceiling`.
        """
        self.context = context
        self.state = state
        self.checkpointer = checkpointer
        self.num_tokens = 0
        """Tokens of all steps so far; an upper bound for those before this process."""
        validated_run = context.validated_run
        plan = context.plan
        ranks = context.rank_environment
        self.sample_order = SampleOrder(context.recipe.seed, len(validated_run.data.train))
        self.flops_per_token_of_length = cache(validated_run.shape.count_flops_per_token)
        self.throughput = ThroughputMeter(ranks.world_size, matmul_flops_per_second)
        self.rank_metrics = RankMetrics(
            state,
            context.device,
            context.rank_sync,
            plan.batch.gradient_accumulation_steps,
            StepProfiler(
                context.folder.path / "profile",
                context.recipe.run.profile_steps,
                context.device,
                ranks.rank,
            ),
        )
        self.policy = StepPolicy(context, state, checkpointer, self.rank_metrics)
        predicted = predict_training_run(validated_run)
        short_rows = plan.batch.row_multiple is not None and validated_run.data.train.is_uneven
        self.prediction_comparison = (
            None if predicted is None else PredictionComparison(predicted, short_rows)
        )
        self.straggler_detector = build_straggler_detector(
            context.recipe.watchdog, RankGrid(plan.layout), ranks.world_size
        )
        experts = validated_run.shape.experts
        self.expert_load_monitor = ExpertLoadMonitor(experts.experts_per_token if experts else 1)

    def run(self) -> float | None:
        """Train to the last step; return the last validation loss, else the last training loss.

        Raises:
            Preempted, SaveFailed, NonFiniteError, RankFailed: As `StepPolicy.apply`.
        """
        context = self.context
        state = self.state
        self.num_tokens = state.step * context.plan.batch.global_batch_tokens
        last_loss = self.policy.make_up_evaluation()
        while state.step < context.validated_run.total_steps:
            context.watchdog.begin_phase("step", state.step)
            result = self._run_step()
            state.step += 1
            self.num_tokens += result.tokens
            sync = context.rank_sync.synchronise_step(
                should_stop=bool(context.stop_request),
                step_seconds=result.times.step_seconds,
                own_seconds=result.times.own_seconds,
            )
            with self.rank_metrics.measure_checkpoint():
                self.checkpointer.poll()
            self._log_step(result, sync.memory_bytes)
            self._compare_step(result, sync)
            loss = self.policy.apply(result.loss, result.update, should_stop=sync.should_stop)
            if loss is not None:
                last_loss = loss
        return last_loss

    def _read_micro_batches(self) -> list[MicroBatch]:
        """Read this rank's samples of the next step; for a GPU into pinned memory."""
        context = self.context
        micro_batches = read_step_micro_batches(
            context.validated_run.data.train,
            self.sample_order,
            context.plan.batch,
            self.state.step + self.state.skipped_data_steps,
            context.data_rank,
        )
        if context.device.type == "cuda":
            return [batch.pin_memory() for batch in micro_batches]
        return micro_batches

    def _run_step(self) -> StepResult:
        """Run one optimizer step."""
        validated_run = self.context.validated_run
        state = self.state
        recipe = validated_run.recipe
        batch = validated_run.plan.batch
        start_seconds = time.perf_counter()
        micro_batches = self._read_micro_batches()
        data_seconds = time.perf_counter() - start_seconds
        learning_rate = compute_learning_rate(
            state.step, recipe.training, validated_run.total_steps, batch.global_batch_size
        )
        with self.rank_metrics.measure_step():
            loss = accumulate_gradients(
                state.model,
                micro_batches,
                seed=recipe.seed,
                step=state.step,
                loss_scale=1.0 if state.scaler is None else state.scaler.scale,
                times=self.rank_metrics.step_times,
                objective=state.objective,
            )
            self.rank_metrics.record_gradient_bytes()
            updated = update_parameters(
                state.model,
                state.optimizer,
                learning_rate=learning_rate,
                max_grad_norm=recipe.training.max_grad_norm,
                scaler=state.scaler,
                router_table=loss.router_table,
                times=self.rank_metrics.step_times,
            )
        mean_loss = loss.mean()
        supervised = int(loss.supervised_tokens)
        # Synchronises the device: the optimizer's kernels are part of the step's time.
        times = self.rank_metrics.finish_step(start_seconds, data_seconds)
        tokens = batch.global_batch_tokens
        flops_per_token = self.flops_per_token_of_length(batch.sequence_length)
        if batch.row_multiple is not None:
            tokens, flops_per_token = count_tokens_and_flops(
                state.model, micro_batches, self.flops_per_token_of_length
            )
        return StepResult(
            mean_loss,
            updated,
            learning_rate,
            supervised,
            tokens,
            flops_per_token,
            times,
            expert_loads=None
            if loss.router_table is None
            else read_expert_loads(loss.router_table, validated_run.shape, batch.global_batch_size),
            preference_metrics=state.objective.pop_metrics()
            if isinstance(state.objective, PreferenceObjective)
            else None,
        )

    def _log_step(self, result: StepResult, memory_bytes: tuple[int, ...]) -> None:
        plan = self.context.plan
        step = self.state.step
        throughput = self.throughput.measure(
            result.tokens, result.times.step_seconds, result.flops_per_token
        )
        self.context.event_logger.log(
            "step",
            step=step,
            loss=result.loss,
            gradient_norm=result.update.gradient_norm,
            learning_rate=result.learning_rate,
            tokens=result.tokens,
            supervised_tokens=result.supervised_tokens,
            samples_seen=(step + self.state.skipped_data_steps) * plan.batch.global_batch_size,
            step_seconds=result.times.step_seconds,
            tokens_per_second=throughput.tokens_per_second,
            model_flops_per_second=throughput.model_flops_per_second,
            mfu=throughput.mfu,
            memory_bytes=memory_bytes,
            waiting_seconds=result.times.part_seconds.get("waiting"),
            **{
                f"{part}_seconds": result.times.part_seconds[part]
                for part in ("data", "forward", "backward", "reduction", "optimizer")
            },
            loss_scale=None if self.state.scaler is None else self.state.scaler.scale,
            **(
                {}
                if result.expert_loads is None
                else self._collect_expert_fields(result.expert_loads)
            ),
            **({} if result.preference_metrics is None else asdict(result.preference_metrics)),
        )
        log_every = self.context.recipe.run.log_every_steps
        self.rank_metrics.log_events(
            self.context.event_logger,
            step,
            result.times,
            log_every_steps=log_every,
            total_steps=self.context.validated_run.total_steps,
        )

    def _collect_expert_fields(self, loads: ExpertLoads) -> dict[str, Any]:
        """Return the step event's fields of a sparse model; warn about an overloaded expert."""
        recipe = self.context.recipe
        warning = self.expert_load_monitor.observe(loads)
        if warning is not None:
            self.context.event_logger.log("warning", step=self.state.step, message=warning)
        return {
            "expert_load": loads.max_load_ratio,
            "expert_tokens": tuple(loads.tokens_by_layer.values())
            if self.state.step % recipe.run.log_every_steps == 0
            else None,
            "dropped_choices": None if recipe.moe.capacity_factor is None else loads.num_dropped,
            "balance_loss": loads.balance_loss,
            "router_z_loss": loads.z_loss,
        }

    def _compare_step(self, result: StepResult, sync: StepSync) -> None:
        """Compare the step's times between ranks, and with the prediction."""
        context = self.context
        if self.straggler_detector is not None and (
            warning := self.straggler_detector.observe(sync.own_seconds)
        ):
            context.log_warning(warning, step=self.state.step)
        if self.prediction_comparison is not None:
            # On a CPU, resident memory is not comparable: the prediction counts tensors.
            self.prediction_comparison.add(
                result.times.step_seconds,
                sync.memory_bytes if context.device.type == "cuda" else (),
            )
