"""The training loop: steps, events, and evaluation, checkpoints and stops between steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch

from shardwright.checkpoint.run_folder import RunFolder
from shardwright.data.loader import read_step_micro_batches
from shardwright.data.sample_order import SampleOrder
from shardwright.errors import NonFiniteError, Preempted, RankFailed
from shardwright.launch.rank_environment import RankEnvironment
from shardwright.launch.stop_signals import StopRequest, describe_cause
from shardwright.layout import RankGrid
from shardwright.optim import compute_learning_rate
from shardwright.telemetry.event_logger import EventLogger
from shardwright.telemetry.meter import ThroughputMeter
from shardwright.train.checkpointing import RunCheckpointer
from shardwright.train.evaluation import evaluate_loss
from shardwright.train.expert_load import ExpertLoadMonitor, ExpertLoads, read_expert_loads
from shardwright.train.loss_spikes import LossSpikeDetector
from shardwright.train.preference_objective import PreferenceMetrics, PreferenceObjective
from shardwright.train.profiling import StepProfiler
from shardwright.train.rank_metrics import RankMetrics, RankStepTimes
from shardwright.train.rank_sync import RankSync
from shardwright.train.replica_check import find_differing_replicas
from shardwright.train.run_checks import ValidatedRun
from shardwright.train.run_prediction import PredictionComparison, predict_training_run
from shardwright.train.sample_texts import choose_prompts, generate_texts, save_texts
from shardwright.train.setup import TrainingState
from shardwright.train.step import accumulate_gradients, count_tokens_and_flops, update_parameters
from shardwright.watchdog.monitor import WatchdogClient
from shardwright.watchdog.stragglers import build_straggler_detector


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step. Identical on all ranks except for the times."""

    loss: float
    gradient_norm: float
    is_skipped: bool
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


@dataclass
class TrainingLoop:
    """State and services that one rank needs to train; `run` trains."""

    validated_run: ValidatedRun
    state: TrainingState
    rank_environment: RankEnvironment
    device: torch.device
    event_logger: EventLogger
    rank_sync: RankSync
    checkpointer: RunCheckpointer
    stop_request: StopRequest
    watchdog: WatchdogClient
    matmul_flops_per_second: float
    """Matmul rate of one device, as measured by `measure_ceiling`."""

    def __post_init__(self) -> None:
        plan = self.validated_run.plan
        data = self.validated_run.data
        self.data_rank = RankGrid(plan.layout).data_rank(self.rank_environment.rank)
        self.sample_order = SampleOrder(self.validated_run.recipe.seed, len(data.train))
        self.flops_per_token_of_length = cache(self.validated_run.shape.count_flops_per_token)
        self.flops_per_token = self.flops_per_token_of_length(plan.batch.sequence_length)
        self.throughput = ThroughputMeter(
            self.rank_environment.world_size, self.matmul_flops_per_second
        )
        profile = RunFolder.from_recipe(self.validated_run.recipe).path / "profile"
        profiled = StepProfiler(
            profile,
            self.validated_run.recipe.run.profile_steps,
            self.device,
            self.rank_environment.rank,
        )
        self.num_tokens = 0
        self.rank_metrics = RankMetrics(
            self.state,
            self.device,
            self.rank_sync,
            plan.batch.gradient_accumulation_steps,
            profiled,
        )
        predicted = predict_training_run(self.validated_run)
        short_rows = plan.batch.row_multiple is not None and data.train.is_uneven
        self.prediction_comparison = (
            None if predicted is None else PredictionComparison(predicted, short_rows)
        )
        self.straggler_detector = build_straggler_detector(
            self.validated_run.recipe.watchdog,
            RankGrid(plan.layout),
            self.rank_environment.world_size,
        )
        self.spike_detector = LossSpikeDetector(self.validated_run.recipe.elastic.rollback)
        self.expert_load_monitor = ExpertLoadMonitor(
            self.validated_run.shape.experts.experts_per_token
            if self.validated_run.shape.experts
            else 1
        )

    def run(self) -> float | None:
        """Train to the last step; return the last validation loss, else the last training loss.

        Raises:
            Preempted: A stop was requested; the state is saved.
            SaveFailed: The last checkpoint could not be written.
            NonFiniteError: Too many consecutive steps had a non-finite gradient.
            RankFailed: A rank's weights differ from those of its replicas.
        """
        recipe = self.validated_run.recipe
        state = self.state
        total_steps = self.validated_run.total_steps
        validates = self.validated_run.data.validation is not None
        # Upper bound for the steps before this process.
        self.num_tokens = state.step * self.validated_run.plan.batch.global_batch_tokens
        last_loss: float | None = None
        if state.is_evaluation_due and validates and (evaluated := self._evaluate(is_last=False)):
            last_loss = evaluated[0]
            if evaluated[1] and recipe.checkpoint.keep_best:
                self.checkpointer.save(is_best=True)
        while state.step < total_steps:
            self.watchdog.begin_phase("step", state.step)
            result = self._run_step()
            state.step += 1
            self.num_tokens += result.tokens
            sync = self.rank_sync.synchronise_step(
                should_stop=bool(self.stop_request),
                step_seconds=result.times.step_seconds,
                own_seconds=result.times.own_seconds,
            )
            with self.rank_metrics.measure_checkpoint():
                self.checkpointer.poll()
            self._log_step(result, sync.memory_bytes)
            if (
                self.straggler_detector is not None
                and (warning := self.straggler_detector.observe(sync.own_seconds))
                and self.rank_environment.is_main_rank
            ):
                self.event_logger.log("warning", step=state.step, message=warning)
            if self.prediction_comparison is not None:
                # On a CPU, resident memory is not comparable: the prediction counts tensors.
                self.prediction_comparison.add(
                    result.times.step_seconds,
                    sync.memory_bytes if self.device.type == "cuda" else (),
                )
            if self._roll_back_if_needed(result):
                continue
            at_end = state.step == total_steps
            stop = sync.should_stop
            improved = False
            last_loss = result.loss
            state.is_evaluation_due = validates and (
                at_end or _is_due(state.step, recipe.evaluation.every_steps)
            )
            if state.is_evaluation_due and (at_end or not stop):
                evaluated = self._evaluate(is_last=at_end)
                stop = stop or evaluated is None
                last_loss, improved = evaluated or (last_loss, False)
            best_due = improved and recipe.checkpoint.keep_best
            saves = at_end or stop or best_due or _is_due(state.step, recipe.checkpoint.every_steps)
            self._check_replicas(saves)
            if saves:
                self.watchdog.begin_phase("save", state.step)
                with self.rank_metrics.measure_checkpoint():
                    self.checkpointer.save(is_best=improved, is_last=at_end or stop)
            if stop and not at_end:
                # Ranks may have different causes; all report that of the lowest rank with one.
                reason = next(
                    describe_cause(int(cause))
                    for (cause,) in self.rank_sync.gather([self.stop_request.cause])
                    if cause
                )
                self.event_logger.log("preempted", step=state.step, reason=reason)
                raise Preempted(
                    f"{reason}: saved at step {state.step} of {total_steps}; --resume continues"
                )
        return last_loss

    def _check_replicas(self, is_save_step: bool) -> None:
        """Compare replicated weights if a check is due, and before they are saved.

        Raises:
            RankFailed: A rank's weights differ from those of its replicas.
        """
        every = self.validated_run.recipe.run.replica_check_every_steps
        step = self.state.step
        if (
            every is not None
            and (is_save_step or _is_due(step, every))
            and (difference := find_differing_replicas(self.state.model))
        ):
            raise RankFailed(
                f"step {step}: {difference}. "
                "This step was not saved; the previous checkpoint is intact"
            )

    def _run_step(self) -> StepResult:
        """Run one optimizer step."""
        checked = self.validated_run
        state = self.state
        recipe = checked.recipe
        batch = checked.plan.batch
        start_seconds = time.perf_counter()
        micro_batches = read_step_micro_batches(
            checked.data.train,
            self.sample_order,
            batch,
            state.step + state.skipped_data_steps,
            self.data_rank,
        )
        data_seconds = time.perf_counter() - start_seconds
        learning_rate = compute_learning_rate(
            state.step, recipe.training, checked.total_steps, batch.global_batch_size
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
        flops_per_token = self.flops_per_token
        if batch.row_multiple is not None:
            tokens, flops_per_token = count_tokens_and_flops(
                state.model, micro_batches, self.flops_per_token_of_length
            )
        experts = (
            None
            if loss.router_table is None
            else read_expert_loads(loss.router_table, checked.shape, batch.global_batch_size)
        )
        preference = (
            state.objective.pop_metrics()
            if isinstance(state.objective, PreferenceObjective)
            else None
        )
        norm = updated.gradient_norm
        skipped = updated.is_skipped
        return StepResult(
            mean_loss,
            norm,
            skipped,
            learning_rate,
            supervised,
            tokens,
            flops_per_token,
            times,
            experts,
            preference,
        )

    def _roll_back_if_needed(self, result: StepResult) -> bool:
        """Roll back if the step requires it and a checkpoint exists; identical on all ranks."""
        reason = self._count_skips(result) or self.spike_detector.observe(
            result.loss, skipped=result.is_skipped
        )
        if reason is None:
            return False
        section = self.validated_run.recipe.elastic.rollback
        step = self.state.step
        assert section is not None
        self.watchdog.begin_phase("save", step)
        if self.spike_detector.has_rollbacks_left and self.checkpointer.roll_back(
            reason, min_steps_back=section.at_least_steps_before
        ):
            self.spike_detector.record_rollback()
            return True
        if self.spike_detector.has_rollbacks_left:
            obstacle = "there is no earlier checkpoint"
        else:
            obstacle = f"no rollbacks are left (max_rollbacks is {section.max_rollbacks})"
        if self.rank_environment.is_main_rank:
            self.event_logger.log(
                "warning", step=step, message=f"{reason}; {obstacle}, so training continues"
            )
        return False

    def _count_skips(self, result: StepResult) -> str | None:
        """Count consecutive skipped steps; same count and decision on all ranks.

        Returns the reason to roll back, if there were too many and a rollback is possible.

        Raises:
            NonFiniteError: There were too many, and no rollback is left or configured.
        """
        state = self.state
        limit = self.validated_run.recipe.training.max_skipped_steps
        if not result.is_skipped:
            state.num_consecutive_skips = 0
            return None
        state.num_consecutive_skips += 1
        scale = None if state.scaler is None else state.scaler.scale
        reason = f"gradient norm is {result.gradient_norm:g}"
        self.event_logger.log(
            "skipped_step",
            step=state.step,
            reason=reason,
            in_a_row=state.num_consecutive_skips,
            loss_scale=scale,
        )
        if state.num_consecutive_skips <= limit:
            return None
        problem = (
            f"{state.num_consecutive_skips} consecutive steps up to step {state.step} "
            "had a non-finite gradient"
        )
        if self.spike_detector.has_rollbacks_left:
            return problem
        raise NonFiniteError(
            f"{problem} (training.max_skipped_steps is {limit}); "
            "lower training.learning_rate or return to an earlier checkpoint"
        )

    def _log_step(self, result: StepResult, memory_bytes: tuple[int, ...]) -> None:
        plan = self.validated_run.plan
        step = self.state.step
        throughput = self.throughput.measure(
            result.tokens, result.times.step_seconds, result.flops_per_token
        )
        self.event_logger.log(
            "step",
            step=step,
            loss=result.loss,
            gradient_norm=result.gradient_norm,
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
        log_every = self.validated_run.recipe.run.log_every_steps
        self.rank_metrics.log_events(
            self.event_logger,
            step,
            result.times,
            log_every_steps=log_every,
            total_steps=self.validated_run.total_steps,
        )

    def _collect_expert_fields(self, loads: ExpertLoads) -> dict[str, Any]:
        """Return the step event's fields of a sparse model; warn about an overloaded expert."""
        recipe = self.validated_run.recipe
        warning = self.expert_load_monitor.observe(loads)
        if warning is not None:
            self.event_logger.log("warning", step=self.state.step, message=warning)
        return {
            "expert_load": loads.max_load_ratio,
            "expert_tokens": tuple(loads.tokens_by_layer.values())
            if self.state.step % recipe.run.log_every_steps == 0
            else None,
            "dropped_choices": None if recipe.moe.capacity_factor is None else loads.num_dropped,
            "balance_loss": loads.balance_loss,
            "router_z_loss": loads.z_loss,
        }

    def _evaluate(self, *, is_last: bool) -> tuple[float, bool] | None:
        """Evaluate; return the validation loss and True if it is the best so far.

        Returns None if a stop is requested meanwhile, except at the last step.
        """
        start_seconds = time.perf_counter()
        state = self.state

        def is_stop_requested() -> bool:
            self.watchdog.begin_phase("evaluate", state.step)
            return not is_last and self.rank_sync.any_rank(bool(self.stop_request))

        evaluated = evaluate_loss(
            self.validated_run, state.model, self.data_rank, is_stop_requested, state.objective
        )
        pairs = (
            state.objective.pop_metrics()
            if isinstance(state.objective, PreferenceObjective)
            else None
        )
        if evaluated is None:
            return None
        state.is_evaluation_due = False
        improved = evaluated.loss < state.best_loss
        state.best_loss = min(state.best_loss, evaluated.loss)
        self.event_logger.log(
            "evaluation",
            step=state.step,
            loss=evaluated.loss,
            perplexity=math.exp(min(evaluated.loss, 700.0)),
            tokens=evaluated.tokens,
            seconds=time.perf_counter() - start_seconds,
            best=improved,
            **({} if pairs is None else asdict(pairs)),
        )
        self._write_samples(is_stop_requested)
        return evaluated.loss, improved

    def _write_samples(self, should_abort: Callable[[], bool]) -> None:
        """Generate continuations of validation rows, if the recipe asks for them."""
        section = self.validated_run.recipe.evaluation
        data = self.validated_run.data
        if not section.num_samples:
            return
        assert data.validation is not None
        texts = generate_texts(
            self.state.model,
            data.tokenizer,
            choose_prompts(data.validation, section.num_samples, section.sample_tokens),
            sequence_length=self.validated_run.plan.batch.sequence_length,
            max_new_tokens=section.sample_tokens,
            should_abort=should_abort,
        )
        if texts is not None and self.rank_environment.is_main_rank:
            save_texts(
                RunFolder.from_recipe(self.validated_run.recipe).samples_path,
                self.state.step,
                texts,
            )


def _is_due(step: int, every_steps: int | None) -> bool:
    return every_steps is not None and step % every_steps == 0
