"""Recipe sections of training: batch, length, schedule, optimizer, precision, evaluation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from shardwright.config.low_precision import FP8Section, LowPrecisionSection, NVFP4Section
from shardwright.config.recipe_section import Fraction, NonNegative, Positive, RecipeSection

PrecisionKind = Literal["auto", "fp32", "bf16", "fp16", "fp64", "fp8", "nvfp4"]
ScheduleKind = Literal["constant", "linear", "cosine", "warmup_stable_decay"]


class TrainingSection(RecipeSection):
    """Batch, length and learning-rate schedule of the training."""

    sequence_length: Positive
    """Tokens per sequence of the model's input (labels are the same sequence shifted by
    one)."""
    micro_batch_size: Positive | None = None
    """Sequences per rank in one forward pass. Default: the rank's share of global_batch_size,
    divided by gradient_accumulation_steps."""
    global_batch_size: Positive | None = None
    """Sequences per optimizer step over all ranks: micro_batch_size x data ranks x
    gradient_accumulation_steps."""
    gradient_accumulation_steps: Positive | None = None
    """Forward-backward passes per optimizer step. Default: as many as global_batch_size takes
    with micro_batch_size; 1 if only one of the two is set."""
    max_steps: Positive | None = None
    """Optimizer steps. If `num_epochs` is also set, training ends at whichever comes first."""
    num_epochs: Annotated[float, Field(strict=True, gt=0, le=1e9)] | None = None
    """Passes over the training samples."""
    learning_rate: Annotated[float, Field(strict=True, ge=0)]
    """Peak learning rate."""
    min_learning_rate: Annotated[float, Field(strict=True, ge=0)] = 0.0
    """Learning rate at the end of a decaying schedule."""
    schedule: ScheduleKind = "cosine"
    """Shape of the learning rate after warmup."""
    warmup_steps: NonNegative = 0
    """Steps of linear warmup: step i of w runs at learning_rate x (i + 1) / (w + 1)."""
    decay_steps: Positive | None = None
    """Length of the final decay, for warmup_stable_decay; default a tenth of the steps."""
    batch_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Scale the learning rate by global_batch_size / base_batch_size, or by its square root."""
    base_batch_size: Positive | None = None
    """Batch size for which `learning_rate` was chosen; required by `batch_scaling`."""
    weight_decay: Annotated[float, Field(strict=True, ge=0)] = 0.0
    """Weight decay of matrices; norms and biases are not decayed. Part of the gradient with
    sgd, decoupled with all other optimizers."""
    max_grad_norm: Annotated[float, Field(strict=True, gt=0)] | None = 1.0
    """Maximum global gradient norm; null disables clipping."""
    label_smoothing: Fraction = 0.0
    """Fraction of the target probability that is spread evenly over the vocabulary. The
    reported training loss is smoothed, the validation loss is not."""
    neftune_noise_alpha: Annotated[float, Field(strict=True, ge=0)] = 0.0
    """Noise added to embeddings in training, uniform in +-alpha / sqrt(sequence_length x
    hidden_size): NEFTune (arXiv 2310.05914; 5 is usual for fine-tuning). It depends on seed,
    step and sample only, so it is the same under every layout."""
    deterministic: bool = False
    """Use deterministic algorithms only, so that a run that stops and resumes gives the same
    bits on CUDA too (on the same devices, with the same layout and versions). Slower. An
    operation without a deterministic implementation is an error that names it."""
    max_skipped_steps: NonNegative = 10
    """Maximum number of consecutive steps that are skipped for a non-finite gradient; one more
    is an error."""

    @model_validator(mode="after")
    def _check_consistency(self) -> TrainingSection:
        if self.max_steps is None and self.num_epochs is None:
            raise ValueError("the length of training is missing: set `max_steps` or `num_epochs`")
        if self.batch_scaling != "none" and self.base_batch_size is None:
            raise ValueError(f"`batch_scaling: {self.batch_scaling}` needs `base_batch_size`")
        if self.batch_scaling == "none" and self.base_batch_size is not None:
            raise ValueError("`base_batch_size` applies only to `batch_scaling: linear` or `sqrt`")
        if self.schedule == "constant" and self.min_learning_rate:
            raise ValueError(
                "`min_learning_rate` has no effect with `schedule: constant`, which does not decay"
            )
        if self.schedule != "warmup_stable_decay" and self.decay_steps is not None:
            raise ValueError(
                f"`decay_steps` is for `schedule: warmup_stable_decay`, not {self.schedule}"
            )
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"`min_learning_rate` ({self.min_learning_rate}) is above "
                f"`learning_rate` ({self.learning_rate})"
            )
        return self


OptimizerName = Literal["adamw", "adamw_8bit", "adafactor", "muon", "sgd"]

_OPTIMIZER_KEYS: dict[OptimizerName, tuple[str, ...]] = {
    "adamw": ("beta1", "beta2", "eps"),
    "adamw_8bit": ("beta1", "beta2", "eps", "block_size"),
    "adafactor": (),
    "muon": ("beta1", "beta2", "eps", "momentum"),
    "sgd": ("momentum",),
}


class OptimizerSection(RecipeSection):
    """Update rule and its hyperparameters. Every layout makes the step of a
    single process; docs/optimizers.md explains how, and the memory of each rule."""

    name: OptimizerName = "adamw"
    """`adamw`; `adamw_8bit`: moments of one byte each (needs the extra `lowbit`); `adafactor`:
    a second moment per row and column, steps relative to each parameter's scale; `muon`:
    orthogonalised momentum for the matrices of the blocks, at AdamW's learning rate, and AdamW
    for all other parameters; `sgd`."""
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    eps: Annotated[float, Field(strict=True, gt=0)] = 1e-8
    """beta1, beta2 and eps apply to adamw, adamw_8bit and the AdamW part of muon."""
    momentum: Fraction | None = None
    """Momentum of sgd (default 0) and of muon's matrices (default 0.95)."""
    block_size: Literal[256, 128, 64, 32] = 256
    """Elements of a row that share a scale, for adamw_8bit."""

    @model_validator(mode="after")
    def _check_keys(self) -> OptimizerSection:
        for key, field in type(self).model_fields.items():
            if key not in ("name", *_OPTIMIZER_KEYS[self.name]) and (
                getattr(self, key) != field.default
            ):
                raise ValueError(f"`{key}` has no effect with `name: {self.name}`")
        return self

    @property
    def effective_momentum(self) -> float:
        """`momentum`, or the optimizer's default."""
        if self.momentum is not None:
            return self.momentum
        return 0.95 if self.name == "muon" else 0.0


class PrecisionSection(RecipeSection):
    """Compute precision; master weights and moments are fp32 (fp64 with `kind: fp64`) unless
    `master_weights` says otherwise."""

    kind: PrecisionKind = "auto"
    """Precision of matrix products. `auto` is bf16 if the device multiplies bf16 natively,
    otherwise fp32; the choice is made at the start of the run, recorded in its folder, and kept
    if the run resumes on another machine. `fp8`, and the experimental `nvfp4`, quantise the
    operands of products in the blocks and compute all else in bf16."""
    fp8: FP8Section | None = None
    """Options of `kind: fp8`; null uses their defaults."""
    nvfp4: NVFP4Section | None = None
    """Options of `kind: nvfp4`; its `experimental` must be true."""
    master_weights: Literal["fp32", "bf16"] = "fp32"
    """Precision in which trained weights, their gradients and moments are stored. `bf16`, for
    `kind: bf16`, takes 8 instead of 16 bytes per parameter with AdamW, 6 with `adamw_8bit`. New
    weights and moments are rounded stochastically, alike in every layout. Gradients of
    micro-batches are added in bf16 (under zero_stage 1 in `reduce_dtype`). For the optimizers
    adamw, adamw_8bit and sgd."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision in which gradients are summed over ranks; with bf16, FSDP2 (zero_stage 1 to 3)
    also accumulates micro-batches in bf16."""
    working_weights: bool | Literal["auto"] = "auto"
    """Store trained matrices that no rank shards (zero_stage 0, or one rank) in the compute
    precision too, cast once per step, instead of casting the master weights at every use. The
    numbers do not change. `auto` does so where it takes no memory at the peak of a step: for
    several micro-batches per step without recompute, and for adapters. On CUDA it also does where
    fewer casts are made and the predicted memory of the run fits into the free memory of the
    fullest device. `true` does so always; copies take 2 bytes per parameter. Weights of 8-bit
    products are kept as codes. With `offload.parameters` and without adapters, copies stay on the
    device and weights do not move in the passes; `auto` does so on CUDA if they fit. Then each rank
    also keeps copies of the shards that ZeRO (zero_stage 1 to 3) gives it."""
    initial_loss_scale: Annotated[float, Field(strict=True, gt=0)] = 2.0**16
    """Initial value of the dynamic loss scale, for fp16."""
    loss_scale_growth_steps: Positive = 1000
    """Finite steps before the loss scale doubles, for fp16; a non-finite step halves it."""

    @model_validator(mode="after")
    def _check_keys(self) -> PrecisionSection:
        for key in ("initial_loss_scale", "loss_scale_growth_steps"):
            if self.kind != "fp16" and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"`{key}` is for `kind: fp16`; {self.kind} needs no loss scale")
        if self.working_weights is True and self.kind in ("fp32", "fp64"):
            raise ValueError(
                f"`working_weights` has no effect with `kind: {self.kind}`, which multiplies the "
                "master weights themselves; remove it"
            )
        if self.master_weights == "bf16" and self.kind not in ("bf16", "auto"):
            raise ValueError(
                f"`master_weights: bf16` needs products of bf16, got `kind: {self.kind}`; set "
                "`kind: bf16`, or remove `master_weights`"
            )
        if self.master_weights == "bf16" and self.working_weights is True:
            raise ValueError(
                "`working_weights` has no effect with `master_weights: bf16`, whose weights are "
                "multiplied as they are; remove it"
            )
        for name in ("fp8", "nvfp4"):
            if getattr(self, name) is not None and self.kind != name:
                raise ValueError(
                    f"`{name}` has no effect with `kind: {self.kind}`; set `kind: {name}`"
                )
        if self.kind == "nvfp4" and not (self.nvfp4 and self.nvfp4.experimental):
            raise ValueError(
                "`kind: nvfp4` is experimental: long runs are not measured; set "
                "`precision.nvfp4.experimental: true` to train with it, or use `kind: fp8`"
            )
        return self

    @property
    def low_precision(self) -> LowPrecisionSection | None:
        """Options of 8-bit or 4-bit products; None for other kinds."""
        if self.kind == "nvfp4":
            return self.nvfp4
        if self.kind != "fp8":
            return None
        return FP8Section() if self.fp8 is None else self.fp8

    @classmethod
    def of_low_precision(cls, section: LowPrecisionSection) -> PrecisionSection:
        """Build the precision whose quantised products have these options."""
        if section.kind == "nvfp4":
            return cls(kind="nvfp4", nvfp4=section)
        return cls(kind="fp8", fp8=section)


def should_cast_once(
    setting: bool | Literal["auto"],
    *,
    has_recompute: bool,
    gradient_accumulation_steps: int,
    has_adapters: bool,
    is_offloaded: bool = False,
) -> bool:
    """Return True if replicated weights are cast once per step (`precision.working_weights`).

    `auto` does so where a step would cast them more than once and save the casts anyway, or
    where only adapters are cast, but not if the weights leave the device. A run on CUDA may copy in
    other cases too, if free memory holds the copies (`training.memory_settings`).
    """
    if setting != "auto" or is_offloaded:
        return setting is True
    if has_adapters:
        return has_recompute or gradient_accumulation_steps > 1
    return not has_recompute and gradient_accumulation_steps > 1


def _parse_precision_setting(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


PrecisionSetting = Annotated[PrecisionSection, BeforeValidator(_parse_precision_setting)]
"""A mapping, or only its `kind`."""


class EvaluationSection(RecipeSection):
    """Evaluation on the validation data."""

    every_steps: Positive | None = None
    """Steps between evaluations; null evaluates only at the end (if there is validation
    data)."""
    micro_batch_size: Positive | None = None
    """Sequences per rank in one forward pass; default training.micro_batch_size (a larger one
    may fit, because no gradients are kept)."""
    max_batches: Positive | None = None
    """Maximum number of micro-batches per rank, so that more ranks evaluate more rows; null uses
    the whole validation set."""
    max_rows: Positive | None = None
    """Maximum number of rows, the first ones of the validation set, over all ranks: the same rows
    under every layout. Null uses the whole validation set."""
    num_samples: NonNegative = 0
    """Number of texts that the model generates at every evaluation, written to `samples/` in
    the run folder. Each continues, with greedy decoding, the part of a validation document
    before its first supervised token. All are generated together, one forward pass per
    token."""
    sample_tokens: Positive = 64
    """Maximum number of tokens of each generated text."""
