"""The training loop: batches in, steps, events out; evaluation, checkpoints and stops between steps."""

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
    """What one optimizer step gave; equal on every rank but for the times."""

    loss: float
    gradient_norm: float
    skipped: bool
    learning_rate: float
    supervised_tokens: int
    tokens: int
    """Computed by all ranks together: supervised, only seen, or filling rows up."""
    flops_per_token: float
    """The model's, on average: attention costs more in longer rows."""
    times: RankStep
    """Of this rank."""
    experts: ExpertLoads | None
    """Of a sparse model."""
    preference: PreferenceNumbers | None = None
    """Of preference tuning."""


@dataclass
class Loop:
    """Everything that one rank needs to train; `run` does it."""

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
    """Of one device, as `measure_ceiling` found it."""

    def __post_init__(self) -> None:
        plan, data = self.checked.plan, self.checked.data
        self.data_rank = RankGrid(plan.layout).data_rank(self.ranks.rank)
        self.order = SampleOrder(self.checked.recipe.seed, len(data.train))
        self.flops_in_row = cache(self.checked.shape.flops_per_token)
        self.flops_per_token = self.flops_in_row(plan.batch.sequence_length)
        self.throughput = ThroughputMeter(self.ranks.world_size, self.matmul_flops_per_second)
        profile = RunFolder.of(self.checked.recipe).path / "profile"
        profiled = ProfiledSteps(profile, self.checked.recipe.run.profile_steps, self.device, self.ranks.rank)
        self.num_tokens = 0
        self.meter = RankMeter(self.state, self.device, self.meeting, plan.batch.gradient_accumulation_steps, profiled)
        predicted, short_rows = forecast(self.checked), plan.batch.row_multiple is not None and data.train.is_uneven
        self.comparison = None if predicted is None else Comparison(predicted, short_rows)
        self.slow = watch_for_slow_ranks(self.checked.recipe.watchdog, RankGrid(plan.layout), self.ranks.world_size)
        self.spikes = SpikeWatch(self.checked.recipe.elastic.rollback)
        self.watch = LoadWatch(self.checked.shape.experts.experts_per_token if self.checked.shape.experts else 1)

    def run(self) -> float | None:
        """Train to the last step; returns the last validation loss, or the last training loss where nothing validates.

        Raises:
            Preempted: somebody asked to stop; the state is saved.
            SaveFailed: the last checkpoint could not be written.
            NonFiniteError: too many steps in a row without a finite gradient.
            RankFailed: a rank's weights are not those of its replicas.
        """
        recipe, state, total_steps = self.checked.recipe, self.state, self.checked.total_steps
        validates = self.checked.data.validation is not None
        self.num_tokens = state.step * self.checked.plan.batch.global_batch_tokens  # of steps before, at most
        last_loss: float | None = None
        if state.evaluation_due and validates and (found := self._evaluate(last=False)):
            last_loss = found[0]
            if found[1] and recipe.checkpoint.keep_best:
                self.saver.save(best=True)
        while state.step < total_steps:
            self.vigil.begin("step", state.step)
            done = self._step()
            state.step += 1
            self.num_tokens += done.tokens
            minutes = self.meeting.hold(
                stop=bool(self.stop), step_seconds=done.times.step_seconds, own_seconds=done.times.own_seconds
            )
            with self.meter.checkpointing():
                self.saver.poll()
            self._tell_step(done, minutes.memory_bytes)
            if self.slow is not None and (named := self.slow.observe(minutes.own_seconds)) and self.ranks.speaks:
                self.speaker.write("warning", step=state.step, message=named)
            if self.comparison is not None:
                # A CPU's resident memory is not the tensors', which are what is predicted.
                self.comparison.add(done.times.step_seconds, minutes.memory_bytes if self.device.type == "cuda" else ())
            if self._went_back(done):
                continue
            at_end, stop = state.step == total_steps, minutes.stop
            improved, last_loss = False, done.loss
            state.evaluation_due = validates and (at_end or _due(state.step, recipe.evaluation.every_steps))
            if state.evaluation_due and (at_end or not stop):
                found = self._evaluate(last=at_end)
                stop = stop or found is None
                last_loss, improved = found or (last_loss, False)
            best_due = improved and recipe.checkpoint.keep_best
            saves = at_end or stop or best_due or _due(state.step, recipe.checkpoint.every_steps)
            self._check_replicas(saves)
            if saves:
                self.vigil.begin("save", state.step)
                with self.meter.checkpointing():
                    self.saver.save(best=improved, last=at_end or stop)
            if stop and not at_end:
                # Which rank was asked first differs from rank to rank: all say the cause of the lowest rank that was asked.
                reason = next(name_cause(int(cause)) for (cause,) in self.meeting.gather([self.stop.cause]) if cause)
                self.speaker.write("preempted", step=state.step, reason=reason)
                raise Preempted(f"{reason}: saved at step {state.step} of {total_steps}; --resume goes on")
        return last_loss

    def _check_replicas(self, saves: bool) -> None:
        """Compare what ranks hold alike when it is due, and before it would be saved.

        Raises:
            RankFailed: a rank's weights are not those of its replicas.
        """
        every, step = self.checked.recipe.run.replica_check_every_steps, self.state.step
        if every is not None and (saves or _due(step, every)) and (difference := differing_replicas(self.state.model)):
            raise RankFailed(f"step {step}: {difference}. Nothing of it was saved; the checkpoint before is whole")

    def _step(self) -> StepDone:
        """One optimizer step."""
        checked, state = self.checked, self.state
        recipe, batch = checked.recipe, checked.plan.batch
        began = time.perf_counter()
        micro_batches = step_micro_batches(checked.data.train, self.order, batch, state.step + state.steps_left_out, self.data_rank)
        data_seconds = time.perf_counter() - began
        learning_rate = learning_rate_at(state.step, recipe.training, checked.total_steps, batch.global_batch_size)
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
        mean, supervised = loss.mean(), int(loss.supervised_tokens)
        times = self.meter.read(began, data_seconds)  # waits for the device: the optimizer's kernels are this step's time
        tokens, flops_per_token = batch.global_batch_tokens, self.flops_per_token
        if batch.row_multiple is not None:
            tokens, flops_per_token = count_work(state.model, micro_batches, self.flops_in_row)
        experts = None if loss.routers is None else read_loads(loss.routers, checked.shape, batch.global_batch_size)
        preference = state.objective.take() if isinstance(state.objective, PreferenceObjective) else None
        norm, skipped = updated.gradient_norm, updated.skipped
        return StepDone(mean, norm, skipped, learning_rate, supervised, tokens, flops_per_token, times, experts, preference)

    def _went_back(self, done: StepDone) -> bool:
        """Whether this step was one to go back from, and there was somewhere to go; every rank comes to the same answer."""
        reason = self._count_skips(done) or self.spikes.observe(done.loss, skipped=done.skipped)
        if reason is None:
            return False
        section, step = self.checked.recipe.elastic.rollback, self.state.step
        assert section is not None
        self.vigil.begin("save", step)
        if self.spikes.may_go_back and self.saver.go_back(reason, at_least_steps_before=section.at_least_steps_before):
            self.spikes.went_back()
            return True
        why = "there is no checkpoint to go back to" if self.spikes.may_go_back else f"{section.max_rollbacks} rollbacks were made"
        if self.ranks.speaks:
            self.speaker.write("warning", step=step, message=f"{reason}; {why}: training goes on")
        return False

    def _count_skips(self, done: StepDone) -> str | None:
        """Keep count of skipped steps in a row; every rank comes to the same count and the same decision.

        Returns why to go back, where there were too many and the recipe goes back.

        Raises:
            NonFiniteError: there were too many, and it does not, or not again.
        """
        state, limit = self.state, self.checked.recipe.training.max_skipped_steps
        if not done.skipped:
            state.skipped_in_a_row = 0
            return None
        state.skipped_in_a_row += 1
        scale = None if state.scaler is None else state.scaler.scale
        reason = f"gradient norm is {done.gradient_norm:g}"
        self.speaker.write("skipped_step", step=state.step, reason=reason, in_a_row=state.skipped_in_a_row, loss_scale=scale)
        if state.skipped_in_a_row <= limit:
            return None
        told = f"{state.skipped_in_a_row} steps in a row up to step {state.step} had a gradient that is not finite"
        if self.spikes.may_go_back:
            return told
        raise NonFiniteError(
            f"{told} (training.max_skipped_steps is {limit}); lower training.learning_rate or go back to a checkpoint"
        )

    def _tell_step(self, done: StepDone, memory_bytes: tuple[int, ...]) -> None:
        plan, step = self.checked.plan, self.state.step
        throughput = self.throughput.measure(done.tokens, done.times.step_seconds, done.flops_per_token)
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
            **{f"{part}_seconds": done.times.parts[part] for part in ("data", "forward", "backward", "reduction", "optimizer")},
            loss_scale=None if self.state.scaler is None else self.state.scaler.scale,
            **({} if done.experts is None else self._tell_experts(done.experts)),
            **({} if done.preference is None else asdict(done.preference)),
        )
        log_every = self.checked.recipe.run.log_every_steps
        self.meter.tell(self.speaker, step, done.times, log_every_steps=log_every, total_steps=self.checked.total_steps)

    def _tell_experts(self, loads: ExpertLoads) -> dict[str, Any]:
        """The step event's fields of a sparse model; names an overloaded expert."""
        recipe = self.checked.recipe
        warning = self.watch.observe(loads)
        if warning is not None:
            self.speaker.write("warning", step=self.state.step, message=warning)
        return {
            "expert_load": loads.busiest,
            "expert_tokens": tuple(loads.tokens.values()) if self.state.step % recipe.run.log_every_steps == 0 else None,
            "dropped_choices": None if recipe.moe.capacity_factor is None else loads.dropped,
            "balance_loss": loads.balance_loss,
            "router_z_loss": loads.z_loss,
        }

    def _evaluate(self, *, last: bool) -> tuple[float, bool] | None:
        """Validation loss and whether it is the best so far; None when somebody asked to stop meanwhile (not at the last step)."""
        began = time.perf_counter()
        state = self.state

        def asked_to_stop() -> bool:
            self.vigil.begin("evaluate", state.step)
            return not last and self.meeting.any(bool(self.stop))

        found = evaluate(self.checked, state.model, self.data_rank, asked_to_stop, state.objective)
        pairs = state.objective.take() if isinstance(state.objective, PreferenceObjective) else None
        if found is None:
            return None
        state.evaluation_due = False
        improved = found.loss < state.best_loss
        state.best_loss = min(state.best_loss, found.loss)
        self.speaker.write(
            "evaluation",
            step=state.step,
            loss=found.loss,
            perplexity=math.exp(min(found.loss, 700.0)),
            tokens=found.tokens,
            seconds=time.perf_counter() - began,
            best=improved,
            **({} if pairs is None else asdict(pairs)),
        )
        self._write_samples(asked_to_stop)
        return found.loss, improved

    def _write_samples(self, abandon: Callable[[], bool]) -> None:
        """Have the model go on from validation rows, where the recipe asks for it."""
        section, data = self.checked.recipe.evaluation, self.checked.data
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
