"""The training loop: steps, events, and evaluation, checkpoints and stops between steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch

from shardwright.data.loader import step_micro_batches
from shardwright.data.order import SampleOrder
from shardwright.errors import NonFiniteError, Preempted, RankFailed
from shardwright.layout import RankGrid
from shardwright.optim import learning_rate_at
from shardwright.telemetry.meter import ThroughputMeter
from shardwright.telemetry.speaker import Speaker
from shardwright.train.evaluation import evaluate
from shardwright.train.experts import ExpertLoads, LoadWatch, read_loads
from shardwright.train.folder import RunFolder
from shardwright.train.forecast import Comparison, forecast
from shardwright.train.measuring import RankMeter, RankStep
from shardwright.train.meeting import Meeting
from shardwright.train.preference import PreferenceNumbers, PreferenceObjective
from shardwright.train.preflight import Checked
from shardwright.train.profiling import ProfiledSteps
from shardwright.train.ranks import RankEnvironment
from shardwright.train.replicas import differing_replicas
from shardwright.train.rollback import SpikeWatch
from shardwright.train.samples import choose_prompts, save_texts, write_texts
from shardwright.train.saving import Saver
from shardwright.train.setup import TrainState
from shardwright.train.signals import StopRequest, name_cause
from shardwright.train.step import accumulate_gradients, count_work, update
from shardwright.train.stragglers import watch_for_slow_ranks
from shardwright.train.watchdog import Vigil


@dataclass(frozen=True)
class StepDone:
    """Result of one optimizer step. Identical on all ranks except for the times."""

    loss: float
    gradient_norm: float
    skipped: bool
    learning_rate: float
    supervised_tokens: int
    tokens: int
    """Tokens that all ranks computed: supervised, unsupervised and padding."""
    flops_per_token: float
    """Mean FLOPs per token of the model; attention costs more in longer rows."""
    times: RankStep
    """Times of this rank in seconds."""
    experts: ExpertLoads | None
    """Expert loads. None for dense models."""
    preference: PreferenceNumbers | None = None
    """Mean rewards of the step's pairs. None without preference tuning."""


@dataclass
class Loop:
    """State and services that one rank needs to train; `run` trains."""

    checked: Checked
    state: TrainState
    ranks: RankEnvironment
    device: torch.device
    speaker: Speaker
    meeting: Meeting
    saver: Saver
    stop: StopRequest
    vigil: Vigil
    matmul_flops_per_second: float
    """Matmul rate of one device, as measured by `measure_ceiling`."""

    def __post_init__(self) -> None:
        plan = self.checked.plan
        data = self.checked.data
        self.data_rank = RankGrid(plan.layout).data_rank(self.ranks.rank)
        self.order = SampleOrder(self.checked.recipe.seed, len(data.train))
        self.flops_in_row = cache(self.checked.shape.flops_per_token)
        self.flops_per_token = self.flops_in_row(plan.batch.sequence_length)
        self.throughput = ThroughputMeter(self.ranks.world_size, self.matmul_flops_per_second)
        profile = RunFolder.of(self.checked.recipe).path / "profile"
        profiled = ProfiledSteps(
            profile, self.checked.recipe.run.profile_steps, self.device, self.ranks.rank
        )
        self.num_tokens = 0
        self.meter = RankMeter(
            self.state, self.device, self.meeting, plan.batch.gradient_accumulation_steps, profiled
        )
        predicted = forecast(self.checked)
        short_rows = plan.batch.row_multiple is not None and data.train.is_uneven
        self.comparison = None if predicted is None else Comparison(predicted, short_rows)
        self.slow = watch_for_slow_ranks(
            self.checked.recipe.watchdog, RankGrid(plan.layout), self.ranks.world_size
        )
        self.spikes = SpikeWatch(self.checked.recipe.elastic.rollback)
        self.watch = LoadWatch(
            self.checked.shape.experts.experts_per_token if self.checked.shape.experts else 1
        )

    def run(self) -> float | None:
        """Train to the last step; return the last validation loss, else the last training loss.

        Raises:
            Preempted: A stop was requested; the state is saved.
            SaveFailed: The last checkpoint could not be written.
            NonFiniteError: Too many consecutive steps had a non-finite gradient.
            RankFailed: A rank's weights differ from those of its replicas.
        """
        recipe = self.checked.recipe
        state = self.state
        total_steps = self.checked.total_steps
        validates = self.checked.data.validation is not None
        # Upper bound for the steps before this process.
        self.num_tokens = state.step * self.checked.plan.batch.global_batch_tokens
        last_loss: float | None = None
        if state.evaluation_due and validates and (evaluated := self._evaluate(last=False)):
            last_loss = evaluated[0]
            if evaluated[1] and recipe.checkpoint.keep_best:
                self.saver.save(best=True)
        while state.step < total_steps:
            self.vigil.begin("step", state.step)
            result = self._step()
            state.step += 1
            self.num_tokens += result.tokens
            sync = self.meeting.hold(
                stop=bool(self.stop),
                step_seconds=result.times.step_seconds,
                own_seconds=result.times.own_seconds,
            )
            with self.meter.checkpointing():
                self.saver.poll()
            self._tell_step(result, sync.memory_bytes)
            if (
                self.slow is not None
                and (warning := self.slow.observe(sync.own_seconds))
                and self.ranks.speaks
            ):
                self.speaker.write("warning", step=state.step, message=warning)
            if self.comparison is not None:
                # On a CPU, resident memory is not comparable: the prediction counts tensors.
                self.comparison.add(
                    result.times.step_seconds,
                    sync.memory_bytes if self.device.type == "cuda" else (),
                )
            if self._went_back(result):
                continue
            at_end = state.step == total_steps
            stop = sync.stop
            improved = False
            last_loss = result.loss
            state.evaluation_due = validates and (
                at_end or _due(state.step, recipe.evaluation.every_steps)
            )
            if state.evaluation_due and (at_end or not stop):
                evaluated = self._evaluate(last=at_end)
                stop = stop or evaluated is None
                last_loss, improved = evaluated or (last_loss, False)
            best_due = improved and recipe.checkpoint.keep_best
            saves = at_end or stop or best_due or _due(state.step, recipe.checkpoint.every_steps)
            self._check_replicas(saves)
            if saves:
                self.vigil.begin("save", state.step)
                with self.meter.checkpointing():
                    self.saver.save(best=improved, last=at_end or stop)
            if stop and not at_end:
                # Ranks may have different causes; all report that of the lowest rank with one.
                reason = next(
                    name_cause(int(cause))
                    for (cause,) in self.meeting.gather([self.stop.cause])
                    if cause
                )
                self.speaker.write("preempted", step=state.step, reason=reason)
                raise Preempted(
                    f"{reason}: saved at step {state.step} of {total_steps}; --resume continues"
                )
        return last_loss

    def _check_replicas(self, saves: bool) -> None:
        """Compare replicated weights if a check is due, and before they are saved.

        Raises:
            RankFailed: A rank's weights differ from those of its replicas.
        """
        every = self.checked.recipe.run.replica_check_every_steps
        step = self.state.step
        if (
            every is not None
            and (saves or _due(step, every))
            and (difference := differing_replicas(self.state.model))
        ):
            raise RankFailed(
                f"step {step}: {difference}. "
                "This step was not saved; the previous checkpoint is intact"
            )

    def _step(self) -> StepDone:
        """Run one optimizer step."""
        checked = self.checked
        state = self.state
        recipe = checked.recipe
        batch = checked.plan.batch
        start_seconds = time.perf_counter()
        micro_batches = step_micro_batches(
            checked.data.train, self.order, batch, state.step + state.steps_left_out, self.data_rank
        )
        data_seconds = time.perf_counter() - start_seconds
        learning_rate = learning_rate_at(
            state.step, recipe.training, checked.total_steps, batch.global_batch_size
        )
        with self.meter.step():
            loss = accumulate_gradients(
                state.model,
                micro_batches,
                seed=recipe.seed,
                step=state.step,
                loss_scale=1.0 if state.scaler is None else state.scaler.scale,
                times=self.meter.times,
                objective=state.objective,
            )
            self.meter.note_gradients()
            updated = update(
                state.model,
                state.optimizer,
                learning_rate=learning_rate,
                max_grad_norm=recipe.training.max_grad_norm,
                scaler=state.scaler,
                routers=loss.routers,
                times=self.meter.times,
            )
        mean_loss = loss.mean()
        supervised = int(loss.supervised_tokens)
        # Synchronises the device: the optimizer's kernels are part of the step's time.
        times = self.meter.read(start_seconds, data_seconds)
        tokens = batch.global_batch_tokens
        flops_per_token = self.flops_per_token
        if batch.row_multiple is not None:
            tokens, flops_per_token = count_work(state.model, micro_batches, self.flops_in_row)
        experts = (
            None
            if loss.routers is None
            else read_loads(loss.routers, checked.shape, batch.global_batch_size)
        )
        preference = (
            state.objective.take() if isinstance(state.objective, PreferenceObjective) else None
        )
        norm = updated.gradient_norm
        skipped = updated.skipped
        return StepDone(
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

    def _went_back(self, done: StepDone) -> bool:
        """Roll back if the step requires it and a checkpoint exists; identical on all ranks."""
        reason = self._count_skips(done) or self.spikes.observe(done.loss, skipped=done.skipped)
        if reason is None:
            return False
        section = self.checked.recipe.elastic.rollback
        step = self.state.step
        assert section is not None
        self.vigil.begin("save", step)
        if self.spikes.may_go_back and self.saver.go_back(
            reason, at_least_steps_before=section.at_least_steps_before
        ):
            self.spikes.went_back()
            return True
        if self.spikes.may_go_back:
            obstacle = "there is no earlier checkpoint"
        else:
            obstacle = f"no rollbacks are left (max_rollbacks is {section.max_rollbacks})"
        if self.ranks.speaks:
            self.speaker.write(
                "warning", step=step, message=f"{reason}; {obstacle}, so training continues"
            )
        return False

    def _count_skips(self, done: StepDone) -> str | None:
        """Count consecutive skipped steps; same count and decision on all ranks.

        Returns the reason to roll back, if there were too many and a rollback is possible.

        Raises:
            NonFiniteError: There were too many, and no rollback is left or configured.
        """
        state = self.state
        limit = self.checked.recipe.training.max_skipped_steps
        if not done.skipped:
            state.skipped_in_a_row = 0
            return None
        state.skipped_in_a_row += 1
        scale = None if state.scaler is None else state.scaler.scale
        reason = f"gradient norm is {done.gradient_norm:g}"
        self.speaker.write(
            "skipped_step",
            step=state.step,
            reason=reason,
            in_a_row=state.skipped_in_a_row,
            loss_scale=scale,
        )
        if state.skipped_in_a_row <= limit:
            return None
        problem = (
            f"{state.skipped_in_a_row} consecutive steps up to step {state.step} "
            "had a non-finite gradient"
        )
        if self.spikes.may_go_back:
            return problem
        raise NonFiniteError(
            f"{problem} (training.max_skipped_steps is {limit}); "
            "lower training.learning_rate or return to an earlier checkpoint"
        )

    def _tell_step(self, done: StepDone, memory_bytes: tuple[int, ...]) -> None:
        plan = self.checked.plan
        step = self.state.step
        throughput = self.throughput.measure(
            done.tokens, done.times.step_seconds, done.flops_per_token
        )
        self.speaker.write(
            "step",
            step=step,
            loss=done.loss,
            gradient_norm=done.gradient_norm,
            learning_rate=done.learning_rate,
            tokens=done.tokens,
            supervised_tokens=done.supervised_tokens,
            samples_seen=(step + self.state.steps_left_out) * plan.batch.global_batch_size,
            step_seconds=done.times.step_seconds,
            tokens_per_second=throughput.tokens_per_second,
            model_flops_per_second=throughput.model_flops_per_second,
            mfu=throughput.mfu,
            memory_bytes=memory_bytes,
            waiting_seconds=done.times.parts.get("waiting"),
            **{
                f"{part}_seconds": done.times.parts[part]
                for part in ("data", "forward", "backward", "reduction", "optimizer")
            },
            loss_scale=None if self.state.scaler is None else self.state.scaler.scale,
            **({} if done.experts is None else self._tell_experts(done.experts)),
            **({} if done.preference is None else asdict(done.preference)),
        )
        log_every = self.checked.recipe.run.log_every_steps
        self.meter.tell(
            self.speaker,
            step,
            done.times,
            log_every_steps=log_every,
            total_steps=self.checked.total_steps,
        )

    def _tell_experts(self, loads: ExpertLoads) -> dict[str, Any]:
        """Return the step event's fields of a sparse model; warn about an overloaded expert."""
        recipe = self.checked.recipe
        warning = self.watch.observe(loads)
        if warning is not None:
            self.speaker.write("warning", step=self.state.step, message=warning)
        return {
            "expert_load": loads.busiest,
            "expert_tokens": tuple(loads.tokens.values())
            if self.state.step % recipe.run.log_every_steps == 0
            else None,
            "dropped_choices": None if recipe.moe.capacity_factor is None else loads.dropped,
            "balance_loss": loads.balance_loss,
            "router_z_loss": loads.z_loss,
        }

    def _evaluate(self, *, last: bool) -> tuple[float, bool] | None:
        """Evaluate; return the validation loss and True if it is the best so far.

        Returns None if a stop is requested meanwhile, except at the last step.
        """
        start_seconds = time.perf_counter()
        state = self.state

        def is_stop_requested() -> bool:
            self.vigil.begin("evaluate", state.step)
            return not last and self.meeting.any(bool(self.stop))

        evaluated = evaluate(
            self.checked, state.model, self.data_rank, is_stop_requested, state.objective
        )
        pairs = state.objective.take() if isinstance(state.objective, PreferenceObjective) else None
        if evaluated is None:
            return None
        state.evaluation_due = False
        improved = evaluated.loss < state.best_loss
        state.best_loss = min(state.best_loss, evaluated.loss)
        self.speaker.write(
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

    def _write_samples(self, abandon: Callable[[], bool]) -> None:
        """Generate continuations of validation rows, if the recipe asks for them."""
        section = self.checked.recipe.evaluation
        data = self.checked.data
        if not section.num_samples:
            return
        assert data.validation is not None
        texts = write_texts(
            self.state.model,
            data.tokenizer,
            choose_prompts(data.validation, section.num_samples, section.sample_tokens),
            sequence_length=self.checked.plan.batch.sequence_length,
            max_new_tokens=section.sample_tokens,
            abandon=abandon,
        )
        if texts is not None and self.ranks.speaks:
            save_texts(RunFolder.of(self.checked.recipe).samples, self.state.step, texts)


def _due(step: int, every_steps: int | None) -> bool:
    return every_steps is not None and step % every_steps == 0
