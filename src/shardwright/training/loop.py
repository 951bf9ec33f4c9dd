"""The training loop: steps, their events and their measurements."""

from __future__ import annotations

import time
from dataclasses import asdict
from functools import cache
from typing import Any

import torch

from shardwright.data.loader import MicroBatch, read_step_micro_batches
from shardwright.data.run_order import build_run_order
from shardwright.layout import RankGrid
from shardwright.offload import OffloadedOptimizer, TransferCounts
from shardwright.optim import compute_learning_rate
from shardwright.parallel.experts.padded_exchange import find_padded_exchange
from shardwright.placement import select_scaled_weights
from shardwright.telemetry.meter import ThroughputMeter
from shardwright.training.batch_prefetch import BatchPrefetcher
from shardwright.training.checkpointing import RunCheckpointer
from shardwright.training.garbage_collection import GarbageCollection
from shardwright.training.metrics.expert_load import (
    ExpertLoadMonitor,
    ExpertLoads,
    read_expert_loads,
)
from shardwright.training.metrics.profiling import StepProfiler
from shardwright.training.metrics.rank_metrics import MeasuredStep, RankMetrics, RankStepTimes
from shardwright.training.metrics.rounding import (
    RoundingMonitor,
    RoundingReport,
    read_rounding,
    sum_rounding_table,
)
from shardwright.training.metrics.run_prediction import compare_with_prediction
from shardwright.training.preference_objective import PreferenceMetrics, PreferenceObjective
from shardwright.training.rank_context import RankContext
from shardwright.training.rank_sync import StepSync
from shardwright.training.row_limit import RowLimit
from shardwright.training.step import (
    StepLoss,
    StepUpdate,
    accumulate_gradients,
    begin_update,
    compute_mean_loss,
    count_tokens_and_flops,
    update_parameters,
)
from shardwright.training.step_policy import StepPolicy
from shardwright.training.step_result import StepResult
from shardwright.training.training_state import TrainingState
from shardwright.watchdog.stragglers import build_straggler_detector


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
        self._launched: StepResult | None = None
        """Last step, if `_finish_step` has not been called for it."""
        validated_run = context.validated_run
        plan = context.plan
        ranks = context.rank_environment
        sample_order = build_run_order(
            validated_run.data.train, context.recipe.seed, plan.batch.global_batch_size
        )
        self.batches = BatchPrefetcher(
            lambda step: read_step_micro_batches(
                validated_run.data.train, sample_order, plan.batch, step, context.data_rank
            ),
            context.device,
        )
        self.flops_per_token_of_length = cache(validated_run.count_flops_per_token)
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
        self.prediction_comparison = compare_with_prediction(context)
        self.straggler_detector = build_straggler_detector(
            context.recipe.watchdog, RankGrid(plan.layout), ranks.world_size
        )
        experts = validated_run.shape.experts
        low_precision = plan.precision.low_precision
        self.rounding_monitor = RoundingMonitor(plan.precision.kind)
        self.kind_of_scaled_weight = (
            {}
            if low_precision is None
            else select_scaled_weights(validated_run.shape, low_precision)
        )
        self.expert_load_monitor = ExpertLoadMonitor(experts.experts_per_token if experts else 1)
        exchange = find_padded_exchange(state.model.decoder)
        self.row_limit = None if exchange is None else RowLimit(exchange)

    def run(self) -> float | None:
        """Train to the last step; return the last validation loss, else the last training loss.

        Raises:
            Preempted, GenerationEnded, SaveFailed, NonFiniteError, RankFailed: As
                `StepPolicy.apply`.
        """
        self.num_tokens = self.state.step * self.context.plan.batch.global_batch_tokens
        with self.batches, GarbageCollection() as garbage_collection:
            return self._run_steps(garbage_collection)

    def _run_steps(self, garbage_collection: GarbageCollection) -> float | None:
        """Run the steps.

        On CUDA the times of a step are known, and its event is written, when the next step has
        been launched, unless the policy acts in between: so the host never waits for an update.
        """
        context = self.context
        state = self.state
        self.policy.begin()
        last_loss = self.policy.make_up_evaluation()
        while state.step < context.validated_run.total_steps:
            context.watchdog.begin_phase("step", state.step)
            with self.rank_metrics.measure_checkpoint():
                self.checkpointer.begin_peer_copy()
            result = self._run_step()
            state.step += 1
            self.num_tokens += result.tokens
            should_stop = self._launched is not None and self._finish_step(self._launched)
            self._launched = result if self._may_finish_later(result) and not should_stop else None
            if self._launched is None:
                should_stop |= self._finish_step(result)
            if should_stop or self.policy.may_act(state.step, result.update):
                state.wait_for_update()
            garbage_collection.collect_if_due(state.step)
            loss = self.policy.apply(result.loss, result.update, should_stop=should_stop)
            if loss is not None:
                last_loss = loss
        state.model.invalidate_weights()  # wait for gathers that the last update has begun
        return last_loss

    def _may_finish_later(self, result: StepResult) -> bool:
        """Return True if nothing needs the step's times before the next step is launched.

        A pipeline's timeline is aligned with the host's clock while the device is idle, and a
        profile has the kernels of its own step only.
        """
        return (
            self.context.device.type == "cuda"
            and self.state.model.pipeline is None
            and not self.policy.may_act(result.step, result.update)
            and not self.rank_metrics.is_profiled(result.step)
            and not self.rank_metrics.is_profiled(result.step + 1)
        )

    def _finish_step(self, result: StepResult) -> bool:
        """Log and compare a step that has ended; return True if any rank is asked to stop.

        Collective.
        """
        times = self.rank_metrics.finish_step(result.measured)
        sync = self.context.rank_sync.synchronise_step(
            should_stop=bool(self.context.stop_request),
            step_seconds=times.step_seconds,
            own_seconds=times.own_seconds,
        )
        with self.rank_metrics.measure_checkpoint():
            self.checkpointer.poll()
        self._log_step(result, times, sync.memory_bytes)
        self._compare_step(result, times, sync)
        return sync.should_stop

    def _read_micro_batches(self) -> list[MicroBatch]:
        """Return this rank's samples of the next step, and start to read those after it."""
        state = self.state
        step = state.step + state.skipped_data_steps
        is_last = state.step + 1 == self.context.validated_run.total_steps
        return self.batches.read(step, None if is_last else step + 1)

    def _run_step(self) -> StepResult:
        """Run one optimizer step; the host waits for the device once, to read its numbers."""
        validated_run = self.context.validated_run
        state = self.state
        batch = validated_run.plan.batch
        start_seconds = time.perf_counter()
        micro_batches = self._read_micro_batches()
        data_seconds = time.perf_counter() - start_seconds
        learning_rate = compute_learning_rate(
            state.step,
            validated_run.recipe.training,
            validated_run.total_steps,
            batch.global_batch_size,
        )
        with self.rank_metrics.measure_step():
            updated, values = self._try_step(micro_batches, learning_rate)
            beyond_limit = updated.rows_beyond_limit
            if beyond_limit:
                assert self.row_limit is not None
                with self.row_limit.exchange.exchange_exactly():
                    updated, values = self._try_step(micro_batches, learning_rate)
                self.context.log_warning(
                    self.row_limit.count_repeated_step(beyond_limit), step=state.step + 1
                )
        measured = self.rank_metrics.end_step(
            start_seconds,
            data_seconds,
            previous=None if self._launched is None else self._launched.measured,
        )
        return self._build_result(values, updated, learning_rate, measured)

    def _try_step(
        self, micro_batches: list[MicroBatch], learning_rate: float
    ) -> tuple[StepUpdate, dict[str, list[float]]]:
        """Compute gradients and apply them, unless padded exchanges have omitted rows."""
        state = self.state
        recipe = self.context.recipe
        totals = state.model.decoder.rounding_totals
        if totals is not None:
            totals.is_counting = (state.step + 1) % recipe.run.log_every_steps == 0
        begin_update(state.optimizer, learning_rate)
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
        numbers = self._sum_numbers(loss, micro_batches)
        updated = update_parameters(
            state.model,
            state.optimizer,
            learning_rate=learning_rate,
            max_grad_norm=recipe.training.max_grad_norm,
            scaler=state.scaler,
            router_table=loss.router_table,
            rows_beyond_limit=loss.rows_beyond_limit,
            read_along=tuple(numbers.values()),
            times=self.rank_metrics.step_times,
            overlaps_forward=not self.policy.may_read_weights(state.step + 1),
        )
        return updated, dict(zip(numbers, updated.read_values, strict=True))

    def _sum_numbers(
        self, loss: StepLoss, micro_batches: list[MicroBatch]
    ) -> dict[str, torch.Tensor]:
        """Sum the step's statistics over ranks, on the device; the host reads all in one copy."""
        state = self.state
        numbers = {
            "loss_sum": loss.loss_sum,
            "count": loss.count,
            "supervised_tokens": loss.supervised_tokens,
        }
        if loss.router_table is not None:
            numbers["router_table"] = loss.router_table
        if isinstance(state.objective, PreferenceObjective):
            numbers["pairs"] = state.objective.pop_totals()
        totals = state.model.decoder.rounding_totals
        if totals is not None and totals.is_counting:
            numbers["rounding"] = sum_rounding_table(state.model, totals)
            totals.is_counting = False
        if self.context.plan.batch.row_multiple is not None:
            numbers["work"] = count_tokens_and_flops(
                state.model, micro_batches, self.flops_per_token_of_length
            )
        return numbers

    def _build_result(
        self,
        values: dict[str, list[float]],
        updated: StepUpdate,
        learning_rate: float,
        measured: MeasuredStep,
    ) -> StepResult:
        """Build the result of a step from its statistics, as read by the host."""
        state = self.state
        shape = self.context.validated_run.shape
        batch = self.context.plan.batch
        totals = state.model.decoder.rounding_totals
        tokens = batch.global_batch_tokens
        flops_per_token = self.flops_per_token_of_length(batch.sequence_length)
        if "work" in values:
            tokens = int(values["work"][0])
            flops_per_token = values["work"][1] / values["work"][0]
        step = state.step + 1
        return StepResult(
            step,
            compute_mean_loss(values["loss_sum"][0], values["count"][0]),
            updated,
            learning_rate,
            int(values["supervised_tokens"][0]),
            tokens,
            flops_per_token,
            (step + state.skipped_data_steps) * batch.global_batch_size,
            None if state.scaler is None else state.scaler.scale,
            measured,
            expert_loads=read_expert_loads(
                torch.tensor(values["router_table"], dtype=torch.float64).view(
                    shape.num_layers, -1
                ),
                shape,
                batch.global_batch_size,
            )
            if "router_table" in values
            else None,
            preference_metrics=PreferenceMetrics.from_totals(values["pairs"])
            if "pairs" in values
            else None,
            transfers=state.optimizer.pop_counts()
            if isinstance(state.optimizer, OffloadedOptimizer)
            else None,
            rounding=read_rounding(values["rounding"], totals.names, self.kind_of_scaled_weight)
            if totals is not None and "rounding" in values
            else None,
            activation_transfers=None
            if state.activation_offload is None
            else state.activation_offload.pop_counts(),
            parameter_transfers=None
            if state.weight_offload is None
            else state.weight_offload.pop_counts(),
        )

    def _log_step(
        self, result: StepResult, times: RankStepTimes, memory_bytes: tuple[int, ...]
    ) -> None:
        step = result.step
        throughput = self.throughput.measure(
            result.tokens, times.step_seconds, result.flops_per_token
        )
        self.context.event_logger.log(
            "step",
            step=step,
            loss=result.loss,
            gradient_norm=result.update.gradient_norm,
            learning_rate=result.learning_rate,
            tokens=result.tokens,
            supervised_tokens=result.supervised_tokens,
            samples_seen=result.samples_seen,
            step_seconds=times.step_seconds,
            tokens_per_second=throughput.tokens_per_second,
            model_flops_per_second=throughput.model_flops_per_second,
            mfu=throughput.mfu,
            memory_bytes=memory_bytes,
            waiting_seconds=times.part_seconds.get("waiting"),
            **{
                f"{part}_seconds": times.part_seconds[part]
                for part in ("data", "forward", "backward", "reduction", "optimizer")
            },
            loss_scale=result.loss_scale,
            **(
                {}
                if result.expert_loads is None
                else self._collect_expert_fields(step, result.expert_loads)
            ),
            **({} if result.preference_metrics is None else asdict(result.preference_metrics)),
            **({} if result.rounding is None else self._collect_rounding(step, result.rounding)),
            **_collect_offload_fields("offload", result.transfers),
            **_collect_offload_fields("activation", result.activation_transfers),
            **_collect_offload_fields(
                "parameter",
                result.parameter_transfers,
                is_read_only=self.state.model.trained_offload is None,
            ),
        )
        log_every = self.context.recipe.run.log_every_steps
        self.rank_metrics.log_events(
            self.context.event_logger,
            step,
            times,
            log_every_steps=log_every,
            total_steps=self.context.validated_run.total_steps,
        )

    def _collect_rounding(self, step: int, rounding: RoundingReport) -> dict[str, Any]:
        """Return the step event's fields of quantised operands; warn of wrong ones."""
        for warning in self.rounding_monitor.observe(rounding):
            self.context.event_logger.log("warning", step=step, message=warning)
        return rounding.list_event_fields()

    def _collect_expert_fields(self, step: int, loads: ExpertLoads) -> dict[str, Any]:
        """Return the step event's fields of a sparse model; warn about an overloaded expert."""
        recipe = self.context.recipe
        warning = self.expert_load_monitor.observe(loads)
        if warning is not None:
            self.context.event_logger.log("warning", step=step, message=warning)
        return {
            "expert_load": loads.max_load_ratio,
            "expert_tokens": tuple(loads.tokens_by_layer.values())
            if step % recipe.run.log_every_steps == 0
            else None,
            "dropped_choices": None if recipe.moe.capacity_factor is None else loads.num_dropped,
            "balance_loss": loads.balance_loss,
            "router_z_loss": loads.z_loss,
        }

    def _compare_step(self, result: StepResult, times: RankStepTimes, sync: StepSync) -> None:
        """Compare the step's times between ranks, and with the prediction."""
        context = self.context
        if self.straggler_detector is not None and (
            warning := self.straggler_detector.observe(sync.own_seconds)
        ):
            context.log_warning(warning, step=result.step)
        if self.prediction_comparison is not None:
            # On a CPU, resident memory is not comparable: the prediction counts tensors.
            slowdown = self.prediction_comparison.add(
                times, sync.memory_bytes if context.device.type == "cuda" else ()
            )
            if slowdown is not None:
                context.log_warning(
                    slowdown.describe(), step=result.step, slowdown=slowdown.as_dict()
                )


def _collect_offload_fields(
    prefix: str, transfers: TransferCounts | None, *, is_read_only: bool = False
) -> dict[str, Any]:
    """Return the step event's fields of one use of offloading."""
    if transfers is None:
        return {}
    return {
        f"{prefix}_read_bytes": transfers.read_bytes,
        **({} if is_read_only else {f"{prefix}_written_bytes": transfers.written_bytes}),
        f"{prefix}_waiting_seconds": transfers.waiting_seconds,
    }
