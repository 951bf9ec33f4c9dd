"""The optimisation: batch arithmetic, schedule, update rule, precision, validation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from shardwright.config.section import Fraction, NonNegative, Positive, Section

PrecisionKind = Literal["auto", "fp32", "bf16", "fp16", "fp64"]
ScheduleKind = Literal["constant", "linear", "cosine", "warmup_stable_decay"]


class TrainingSection(Section):
    """Batch arithmetic, length, and the optimisation's schedule."""

    sequence_length: Positive
    """Tokens per sequence that the model sees (inputs; labels are the same sequence shifted by one)."""
    micro_batch_size: Positive | None = None
    """Sequences per rank in one forward pass."""
    global_batch_size: Positive | None = None
    """Sequences per optimizer step over all ranks: micro_batch_size x data ranks x gradient_accumulation_steps."""
    gradient_accumulation_steps: Positive | None = None
    """Forward-backward passes per optimizer step."""
    max_steps: Positive | None = None
    """Optimizer steps. With `num_epochs` too, whichever ends first."""
    num_epochs: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """Passes over the training samples."""
    learning_rate: Annotated[float, Field(ge=0)]
    """Peak learning rate."""
    min_learning_rate: Annotated[float, Field(ge=0)] = 0.0
    """Learning rate at the end of a decaying schedule."""
    schedule: ScheduleKind = "cosine"
    """Shape of the learning rate after warmup."""
    warmup_steps: NonNegative = 0
    """Steps of linear warmup: step i of w runs at learning_rate x (i + 1) / (w + 1)."""
    decay_steps: Positive | None = None
    """For warmup_stable_decay: length of the final decay; default a tenth of the steps."""
    batch_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Scales the learning rate by (global_batch_size / base_batch_size), or its square root."""
    base_batch_size: Positive | None = None
    """Batch for which `learning_rate` was chosen; needed by `batch_scaling`."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decay of matrices, added to the gradient with sgd, decoupled with every other rule; norms and biases are not decayed."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Clip to this global norm; null clips nothing."""
    label_smoothing: Fraction = 0.0
    """Share of each target that is spread evenly over the vocabulary. Losses of training steps are the smoothed ones, those of
    evaluation are not."""
    neftune_noise_alpha: Annotated[float, Field(ge=0)] = 0.0
    """Noise on the embeddings while training, drawn evenly from +-alpha / sqrt(sequence_length x hidden_size): NEFTune (arXiv
    2310.05914; 5 is usual for fine-tuning). A function of seed, step and sample: every layout draws the same."""
    max_skipped_steps: NonNegative = 10
    """Steps in a row that may be skipped for a gradient that is not finite before the run is an error."""

    @model_validator(mode="after")
    def _consistent(self) -> TrainingSection:
        if self.max_steps is None and self.num_epochs is None:
            raise ValueError("say how long to train: `max_steps` or `num_epochs`")
        if self.batch_scaling != "none" and self.base_batch_size is None:
            raise ValueError(f"`batch_scaling: {self.batch_scaling}` needs `base_batch_size`")
        if self.batch_scaling == "none" and self.base_batch_size is not None:
            raise ValueError("`base_batch_size` is for `batch_scaling: linear` or `sqrt`")
        if self.schedule == "constant" and self.min_learning_rate:
            raise ValueError("`min_learning_rate` is where a decaying schedule ends; `schedule: constant` does not decay")
        if self.schedule != "warmup_stable_decay" and self.decay_steps is not None:
            raise ValueError(f"`decay_steps` is for `schedule: warmup_stable_decay`, not {self.schedule}")
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(f"`min_learning_rate` ({self.min_learning_rate}) is above `learning_rate` ({self.learning_rate})")
        return self


OptimizerName = Literal["adamw", "adamw_8bit", "adafactor", "muon", "sgd"]

_OPTIMIZER_KEYS: dict[OptimizerName, tuple[str, ...]] = {
    "adamw": ("beta1", "beta2", "eps"),
    "adamw_8bit": ("beta1", "beta2", "eps", "block_size"),
    "adafactor": (),
    "muon": ("beta1", "beta2", "eps", "momentum"),
    "sgd": ("momentum",),
}


class OptimizerSection(Section):
    """The update rule. Under any layout a step is the one of a single process; docs/optimizers.md says how, and what each costs."""

    name: OptimizerName = "adamw"
    """`adamw`; `adamw_8bit`: its moments in a byte each (needs the extra `lowbit`); `adafactor`: a second moment per row and
    column, steps relative to each parameter's size; `muon`: matrices of blocks by their orthogonal momentum, at the learning rate
    that AdamW would have, all else by AdamW; `sgd`."""
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """beta1, beta2 and eps are those of adamw, adamw_8bit, and of what muon leaves to AdamW."""
    momentum: Fraction | None = None
    """For sgd (default 0) and for muon's matrices (default 0.95)."""
    block_size: Literal[256, 128, 64, 32] = 256
    """For adamw_8bit: elements of a row that share a scale."""

    @model_validator(mode="after")
    def _belongs(self) -> OptimizerSection:
        for key in ("beta1", "beta2", "eps", "momentum", "block_size"):
            if key not in _OPTIMIZER_KEYS[self.name] and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"`{key}` does nothing with `name: {self.name}`")
        return self

    @property
    def momentum_or_default(self) -> float:
        """`momentum`, or what the rule takes without it."""
        if self.momentum is not None:
            return self.momentum
        return 0.95 if self.name == "muon" else 0.0


class PrecisionSection(Section):
    """Compute precision; master weights and moments stay fp32 (fp64 with `kind: fp64`)."""

    kind: PrecisionKind = "auto"
    """Of matrix products. `auto` is bf16 where the device multiplies bf16 natively, otherwise fp32: chosen when the run begins,
    recorded in its folder, and kept when it resumes on another machine."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision in which gradients are summed over ranks; with bf16, FSDP2 (zero_stage 1 to 3) also keeps what it accumulates
    between micro-batches in it."""
    initial_loss_scale: Annotated[float, Field(gt=0)] = 2.0**16
    """For fp16: where dynamic loss scaling starts."""
    loss_scale_growth_steps: Positive = 1000
    """For fp16: finite steps before the scale doubles; a step that is not finite halves it."""

    @model_validator(mode="after")
    def _belongs(self) -> PrecisionSection:
        for key in ("initial_loss_scale", "loss_scale_growth_steps"):
            if self.kind != "fp16" and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"`{key}` is for `kind: fp16`; {self.kind} needs no loss scale")
        return self


def _as_precision(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


Precision = Annotated[PrecisionSection, BeforeValidator(_as_precision)]
"""Written as a mapping, or as its kind alone."""


class EvaluationSection(Section):
    """Validation while training."""

    every_steps: Positive | None = None
    """Steps between evaluations; null evaluates only at the end (when there is validation data)."""
    micro_batch_size: Positive | None = None
    """Sequences per rank in one forward pass; default training.micro_batch_size (without gradients more would fit)."""
    max_batches: Positive | None = None
    """Micro-batches per rank; null is the whole validation set."""
    num_samples: NonNegative = 0
    """Texts that the model writes at every evaluation, into `samples/` of the run folder: it goes on, by the likeliest tokens,
    from what stands before the first learnt token of as many validation documents. Each token is a forward pass of them all."""
    sample_tokens: Positive = 64
    """Tokens that each of them has at most."""
