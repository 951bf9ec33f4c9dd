"""The training loop: batches in, steps, events out; evaluation, checkpoints and stops between steps."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import torch

from shardwright.data.loader import evaluation_micro_batches, step_micro_batches
from shardwright.data.order import SampleOrder
from shardwright.errors import NonFiniteError, Preempted
from shardwright.layout import RankGrid
from shardwright.numerics.ceiling import measure_matmul_flops_per_second
from shardwright.numerics.precision import dtypes
from shardwright.optim import learning_rate_at
from shardwright.telemetry.meter import measure_throughput
from shardwright.telemetry.speaker import Speaker
from shardwright.train.meeting import Meeting
from shardwright.train.preflight import Checked
from shardwright.train.ranks import RankEnvironment
from shardwright.train.saving import Saver
from shardwright.train.setup import TrainState
from shardwright.train.signals import StopRequest
from shardwright.train.step import StepTimes, StepUpdate, accumulate_gradients, update


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

    def __post_init__(self) -> None:
        plan, data = self.checked.plan, self.checked.data
        self.data_rank = RankGrid(plan.layout).data_rank(self.ranks.rank)
        self.order = SampleOrder(self.checked.recipe.seed, len(data.train))
        self.flops_per_token = self.checked.shape.flops_per_token(plan.batch.sequence_length)
        self.matmul_flops_per_second = measure_matmul_flops_per_second(self.device, dtypes(plan.precision).compute)
        self.times = StepTimes(self.device)

    def run(self) -> float | None:
        """Train to the last step; returns the last validation loss, or the last training loss where nothing validates.

        Raises:
            Preempted: somebody asked to stop; the state is saved.
            NonFiniteError: too many steps in a row without a finite gradient.
        """
        recipe, state, total_steps = self.checked.recipe, self.state, self.checked.total_steps
        last_loss: float | None = None
        saved_at = state.step
        while state.step < total_steps:
            last_loss = self._step()
            minutes = self.meeting.hold(stop=bool(self.stop))
            self._tell_step(last_loss, minutes.memory_bytes)
            done, at_end = state.step, state.step == total_steps
            improved = False
            if self.checked.data.validation is not None and (at_end or _due(done, recipe.evaluation.every_steps)):
                last_loss, improved = self._evaluate()
            best_due = improved and recipe.checkpoint.keep_best
            if at_end or minutes.stop or best_due or _due(done, recipe.checkpoint.every_steps):
                self.saver.save(best=improved)
                saved_at = done
            if minutes.stop and not at_end:
                reason = self.stop.name or "a signal to another rank"
                self.speaker.write("preempted", step=done, reason=reason)
                raise Preempted(f"{reason}: saved at step {saved_at} of {total_steps}; --resume goes on")
        return last_loss

    def _step(self) -> float:
        """One optimizer step; returns its loss."""
        checked, state = self.checked, self.state
        recipe, batch = checked.recipe, checked.plan.batch
        self._began = time.perf_counter()
        micro_batches = step_micro_batches(checked.data.train, self.order, batch, state.step, self.data_rank)
        self._data_seconds = time.perf_counter() - self._began
        self._learning_rate = learning_rate_at(state.step, recipe.training, checked.total_steps, batch.global_batch_size)
        loss = accumulate_gradients(
            state.model,
            micro_batches,
            seed=recipe.seed,
            step=state.step,
            loss_scale=1.0 if state.scaler is None else state.scaler.scale,
            times=self.times,
        )
        self._update = update(
            state.model,
            state.optimizer,
            learning_rate=self._learning_rate,
            max_grad_norm=recipe.training.max_grad_norm,
            scaler=state.scaler,
            times=self.times,
        )
        self._supervised_tokens = int(loss.supervised_tokens)
        mean = loss.mean()
        self._step_seconds = time.perf_counter() - self._began
        state.step += 1
        self._count_skips(self._update)
        return mean

    def _count_skips(self, outcome: StepUpdate) -> None:
        """Keep count of skipped steps in a row; every rank comes to the same count and the same decision."""
        state, limit = self.state, self.checked.recipe.training.max_skipped_steps
        if not outcome.skipped:
            state.skipped_in_a_row = 0
            return
        state.skipped_in_a_row += 1
        scale = None if state.scaler is None else state.scaler.scale
        reason = f"gradient norm is {outcome.gradient_norm:g}"
        self.speaker.write("skipped_step", step=state.step, reason=reason, in_a_row=state.skipped_in_a_row, loss_scale=scale)
        if state.skipped_in_a_row > limit:
            raise NonFiniteError(
                f"{state.skipped_in_a_row} steps in a row up to step {state.step} had a gradient that is not finite "
                f"(training.max_skipped_steps is {limit}); lower training.learning_rate or go back to a checkpoint"
            )

    def _tell_step(self, loss: float, memory_bytes: tuple[int, ...]) -> None:
        plan, step = self.checked.plan, self.state.step
        throughput = measure_throughput(
            plan.batch.global_batch_tokens,
            self._step_seconds,
            world_size=self.ranks.world_size,
            flops_per_token=self.flops_per_token,
            matmul_flops_per_second=self.matmul_flops_per_second,
        )
        parts = self.times.seconds()
        self.speaker.write(
            "step",
            step=step,
            loss=loss,
            gradient_norm=self._update.gradient_norm,
            learning_rate=self._learning_rate,
            tokens=plan.batch.global_batch_tokens,
            supervised_tokens=self._supervised_tokens,
            samples_seen=step * plan.batch.global_batch_size,
            step_seconds=self._step_seconds,
            tokens_per_second=throughput.tokens_per_second,
            model_flops_per_second=throughput.model_flops_per_second,
            mfu=throughput.mfu,
            memory_bytes=memory_bytes,
            data_seconds=self._data_seconds,
            forward_seconds=parts["forward"],
            backward_seconds=parts["backward"],
            reduction_seconds=parts["reduction"],
            optimizer_seconds=parts["optimizer"],
            loss_scale=None if self.state.scaler is None else self.state.scaler.scale,
        )

    def _evaluate(self) -> tuple[float, bool]:
        """Mean loss over the validation set, and whether it is the best so far."""
        began = time.perf_counter()
        checked, model = self.checked, self.state.model
        assert checked.data.validation is not None
        section, batch_plan = checked.recipe.evaluation, checked.plan.batch
        if section.micro_batch_size is not None:
            batch_plan = replace(batch_plan, micro_batch_size=section.micro_batch_size)
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        tokens = torch.zeros((), dtype=torch.int64, device=self.device)
        model.decoder.eval()
        with model.evaluating() as module:
            for batch in evaluation_micro_batches(
                checked.data.validation, batch_plan, self.data_rank, max_batches=section.max_batches
            ):
                here = batch.to(self.device)
                loss_sum += module(
                    here.input_ids_BT,
                    positions_BT=here.positions_BT,
                    document_ids_BT=here.document_ids_BT,
                    labels_BT=here.labels_BT,
                ).double()
                tokens += here.num_supervised
        model.decoder.train()
        loss = float(model.sum_over_data(loss_sum) / model.sum_over_data(tokens).clamp(min=1))
        improved = loss < self.state.best_loss
        if improved:
            self.state.best_loss = loss
        self.speaker.write(
            "evaluation",
            step=self.state.step,
            loss=loss,
            perplexity=math.exp(min(loss, 700.0)),
            tokens=int(tokens),
            seconds=time.perf_counter() - began,
            best=improved,
        )
        return loss, improved


def _due(step: int, every_steps: int | None) -> bool:
    return every_steps is not None and step % every_steps == 0
