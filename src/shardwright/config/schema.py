"""The recipe as frozen pydantic models.

Every key here does something; keys are the field's standard words. Defaults are what a careful person would pick for a
first run. Batch arithmetic, divisibility and anything that needs the number of ranks is `plan.resolve`'s business.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

PrecisionKind = Literal["fp32", "bf16", "fp16", "fp64"]
RecomputeKind = Literal["none", "selective", "full"]
ScheduleKind = Literal["constant", "linear", "cosine", "warmup_stable_decay"]
Positive = Annotated[int, Field(gt=0, strict=True)]
NonNegative = Annotated[int, Field(ge=0, strict=True)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]


class Section(BaseModel):
    """Base of all sections: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class ModelSection(Section):
    """Which decoder, and where its weights come from."""

    path: str | None = None
    """A Hugging Face folder: its config.json is the architecture and, with `init: pretrained`, its safetensors the weights."""
    config: dict[str, Any] | None = None
    """The content of a config.json written here instead (`model_type: llama`, ...). `vocab_size` may be left out: the
    tokenizer's is taken."""
    init: Literal["random", "pretrained"] | None = None
    """`pretrained` reads the folder's weights; `random` depends on parameter name and seed only. Default: `pretrained`
    with `path`, `random` with `config`."""
    attention: Literal["auto", "explicit"] = "auto"
    """`auto` uses PyTorch's fused kernels and says in the log where they refuse; `explicit` spells the products out."""
    compile: bool = False
    """torch.compile each block."""
    loss_chunk_tokens: Positive = 1024
    """Tokens whose logits are held at a time by the chunked linear cross-entropy."""
    freeze: tuple[str, ...] = ()
    """Parameters that keep their initial values, by name pattern (`*.bias`). A pattern that matches nothing is an error."""

    @model_validator(mode="after")
    def _one_source(self) -> ModelSection:
        if (self.path is None) == (self.config is None):
            raise ValueError("give either `path` (a Hugging Face folder) or `config` (its config.json inline), not both or neither")
        if self.init == "pretrained" and self.path is None:
            raise ValueError("`init: pretrained` needs `path`, the folder that holds the weights")
        return self

    @property
    def pretrained(self) -> bool:
        """Whether weights are read from `path`."""
        return self.init == "pretrained" or (self.init is None and self.path is not None)


class TokenizerSection(Section):
    """How text becomes ids."""

    kind: Literal["huggingface", "bpe", "character"] = "huggingface"
    """`huggingface`: the tokenizer of `path` (default: the model's folder). `bpe`: byte-level BPE trained on the training
    sources. `character`: one id per character of the training sources."""
    path: str | None = None
    """Folder with tokenizer.json, for `kind: huggingface`."""
    vocab_size: Positive | None = None
    """For `kind: bpe`: size of the vocabulary to train."""

    @model_validator(mode="after")
    def _fits_kind(self) -> TokenizerSection:
        if self.kind == "bpe" and self.vocab_size is None:
            raise ValueError("`kind: bpe` needs `vocab_size`")
        if self.kind != "bpe" and self.vocab_size is not None:
            raise ValueError(f"`vocab_size` is for `kind: bpe`; the size of a {self.kind} tokenizer is its own")
        if self.kind != "huggingface" and self.path is not None:
            raise ValueError(f"`path` is for `kind: huggingface`; a {self.kind} tokenizer is made from the training sources")
        return self


class Source(Section):
    """One place that text comes from."""

    path: str
    """A file, a folder (read recursively, in name order), a folder that Hugging Face `datasets` saved, or an fsspec URL
    (`s3://...`), which is fetched once into the cache. `${NAME}` is taken from the environment."""
    format: Literal["auto", "text", "jsonl", "json", "parquet", "arrow"] = "auto"
    """`auto` goes by file name: .jsonl/.ndjson, .json, .parquet, .arrow, anything else is text (one file, one document)."""
    records: Literal["auto", "text", "messages", "sharegpt", "alpaca", "prompt_response", "prompt_completion", "tokens"] = "auto"
    """What the records of jsonl, json, parquet and arrow hold; `auto` looks at their columns and shows what it found.
    `prompt_response` is answered through the chat template, where there is one; `prompt_completion` is joined as it stands."""
    columns: dict[str, str] = {}
    """Columns by what they hold where they have other than the usual names, e.g. `{prompt: question, response: solution}`."""
    text_field: str = "text"
    """Field or column that holds the text, for records that are plain text."""
    weight: Annotated[float, Field(gt=0)] | None = None
    """Share of the training samples that come from this source, relative to the others' weights; all sources have one or
    none has. Without weights every sample is seen once in an epoch."""
    glob: str | None = None
    """Which files of a folder, e.g. `*.py`; default all of the formats known."""
    exclude: tuple[str, ...] = ()
    """Files and folders to leave out, as patterns against the path below `path` or any part of it, e.g. `test*`."""


def _as_sources(value: Any) -> Any:
    if isinstance(value, str | dict):
        value = [value]
    if isinstance(value, list | tuple):
        return tuple({"path": item} if isinstance(item, str) else item for item in value)
    return value


Sources = Annotated[tuple[Source, ...], BeforeValidator(_as_sources)]


class DataSection(Section):
    """What the model learns from."""

    sources: Sources = Field(min_length=1)
    """Training text: a path, a mapping, or a list of them."""
    validation: Sources = ()
    """Text to validate on. Without it `validation_fraction` of the training sources is held out."""
    validation_fraction: Fraction = 0.0
    """Share held out for validation."""
    validation_split: Literal["documents", "tail"] = "documents"
    """`documents`: whole documents, chosen by a hash of their content (a duplicate never sits on both sides);
    `tail`: the last characters of the corpus."""
    packing: Literal["auto", "windows", "documents", "none"] = "auto"
    """`windows`: the corpus is one stream, cut into windows. `documents`: documents are laid side by side, and attention
    and positions respect their boundaries. `none`: a row for each document. `auto`: windows for plain text, else documents."""
    overlong: Literal["cut", "drop", "refuse"] = "cut"
    """A document longer than sequence_length is cut into rows that do not see each other, or left out, or an error; the
    first two are counted. For `packing: documents` and `none`."""
    supervise: Literal["assistant", "last", "all"] = "assistant"
    """What is learnt of a conversation: the assistant's turns (of a pair, the response), its last turn, or every token.
    A turn's own `loss_weight` of 0 or 1 decides before that. Plain text is always learnt whole."""
    chat_template: str | None = None
    """File with a Jinja chat template, instead of the tokenizer's own."""
    template_variables: dict[str, Any] = {}
    """Passed to the chat template, e.g. `{enable_thinking: false, date_string: 26 Jul 2024}`."""
    num_workers: Positive | None = None
    """Processes that render and tokenise large sets of conversations; default one per core, at most 16."""
    max_broken_fraction: Fraction = 0.01
    """Records that cannot be read are counted with file and line and set aside; above this share it is an error."""
    cache_dir: str | None = None
    """Where tokenised data is kept; default `~/.cache/shardwright/data`, or `$SHARDWRIGHT_CACHE/data`."""

    @model_validator(mode="after")
    def _one_validation(self) -> DataSection:
        if self.validation and self.validation_fraction:
            raise ValueError("give either `validation` (its own sources) or `validation_fraction` (a share of `sources`), not both")
        weighted = sum(source.weight is not None for source in self.sources)
        if 0 < weighted < len(self.sources):
            raise ValueError("give every one of `sources` a `weight`, or none")
        if any(source.weight is not None for source in self.validation):
            raise ValueError("`weight` mixes training sources; validation reads all of its own")
        if self.overlong != "cut" and self.packing == "windows":
            raise ValueError(f"`overlong: {self.overlong}` is for `packing: documents` or `none`; windows cut everywhere")
        return self


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
    num_epochs: Annotated[float, Field(gt=0)] | None = None
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
    """Decay of matrices, decoupled with adamw, added to the gradient with sgd; norms and biases are not decayed."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Clip to this global norm; null clips nothing."""
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


class OptimizerSection(Section):
    """The update rule."""

    name: Literal["adamw", "sgd"] = "adamw"
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """beta1, beta2 and eps are adamw's."""
    momentum: Fraction = 0.0
    """For sgd."""

    @model_validator(mode="after")
    def _belongs(self) -> OptimizerSection:
        foreign = ("momentum",) if self.name == "adamw" else ("beta1", "beta2", "eps")
        for key in foreign:
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"`{key}` does nothing with `name: {self.name}`")
        return self


class PrecisionSection(Section):
    """Compute precision; master weights and moments stay fp32 (fp64 with `kind: fp64`)."""

    kind: PrecisionKind = "fp32"
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


class LayoutSection(Section):
    """Degrees of parallelism. One data degree may be left out: it takes the ranks that remain. `layout: auto` leaves them to the
    planner."""

    auto: bool = False
    """Let the planner choose degrees, ZeRO's stage and the schedule for the devices at hand (or for `cluster`), and of micro
    batch, accumulation and recompute what the recipe leaves open."""
    dp_replicate: Positive | None = None
    """Replicas that hold the same shard (hybrid) or the whole model (zero_stage 0)."""
    dp_shard: Positive | None = None
    """Ranks over which ZeRO shards."""
    tp: Positive = 1
    pp: Positive = 1
    cp: Positive = 1
    ep: Positive = 1
    zero_stage: Literal[0, 1, 2, 3] | None = None
    """0 replicates (DDP); 1 shards optimizer states; 2 gradients too; 3 parameters too (FSDP). Default 3 when anything
    is sharded, else 0."""
    sequence_parallel: bool = True
    """With `tp`: norms and the residual stream are cut over the sequence, too, which saves their memory and costs no traffic."""
    cp_method: Literal["auto", "ring", "all_gather", "ulysses"] = "auto"
    """How attention reaches other ranks' tokens under `cp`: keys and values go round or are gathered, or heads are exchanged."""
    schedule: str = "1f1b"
    """With `pp`: gpipe, 1f1b, interleaved_1f1b, zb_h1, zbv, dualpipev, or a file that holds a schedule."""
    virtual_stages: Positive | None = None
    """With `pp` and interleaved_1f1b: stages per rank; default 2."""
    wrap_blocks: Positive = 1
    """Decoder blocks gathered together (FSDP wrap granularity)."""
    prefetch_depth: NonNegative = 1
    """Groups gathered ahead of use, forward and backward."""
    max_gathers_in_flight: Positive = 2
    """Groups whose full parameters may exist at once, the one in use included; prefetching stops there."""
    bucket_size_bytes: Positive = 25 * 1024**2
    """zero_stage 0: gradients are reduced in buckets of about this size while the backward pass goes on."""

    @model_validator(mode="after")
    def _auto_chooses(self) -> LayoutSection:
        kept = {"auto", "wrap_blocks", "prefetch_depth", "max_gathers_in_flight", "bucket_size_bytes"}
        given = [
            key for key in type(self).model_fields if key not in kept and getattr(self, key) != type(self).model_fields[key].default
        ]
        if self.auto and given:
            raise ValueError(f"`auto` chooses `{given[0]}` itself: leave out one of the two")
        return self


def _as_layout(value: Any) -> Any:
    return {"auto": True} if value == "auto" else value


class ClusterSection(Section):
    """What a layout is planned for, where it is not the devices of this machine."""

    node: str
    """Devices of one node, as `shardwright plan --cluster` takes them: `8xH100-80GB`."""
    link: str | None = None
    """Between nodes: ib400, eth100, ...; default what is usual with the device."""
    profile: str | None = None
    """A file of measured rates, which the planner prefers to the catalogue."""


def _as_cluster(value: Any) -> Any:
    return {"node": value} if isinstance(value, str) else value


class MoeSection(Section):
    """How the experts of a sparse model are kept evenly used; none of it acts outside of training."""

    balance_loss_coefficient: Annotated[float, Field(ge=0)] | None = None
    """Weight of the auxiliary balance loss, counted per sequence. Default: what the model's config.json says
    (router_aux_loss_coef), 0 for a family without that field."""
    z_loss_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the router z-loss, which keeps the router's logits small; 0.001 is usual when training from scratch."""
    capacity_factor: Annotated[float, Field(gt=0)] | None = None
    """Tokens that an expert takes of one sequence, as a multiple of its even share; what is beyond is dropped. Null: nothing is."""
    bias_update_rate: Annotated[float, Field(ge=0)] | None = None
    """By how much a step moves each expert's balance bias towards even loads. Default 0.001 for a model that has such biases."""


class EvaluationSection(Section):
    """Validation while training."""

    every_steps: Positive | None = None
    """Steps between evaluations; null evaluates only at the end (when there is validation data)."""
    micro_batch_size: Positive | None = None
    """Sequences per rank in one forward pass; default training.micro_batch_size (without gradients more would fit)."""
    max_batches: Positive | None = None
    """Micro-batches per rank; null is the whole validation set."""


class CheckpointSection(Section):
    """What is saved, when, where, and how much is kept."""

    dir: str | None = None
    """Where: a folder, or an fsspec URL such as `s3://bucket/run`; default `checkpoints` in the run folder."""
    every_steps: Positive | None = None
    """Steps between checkpoints; null saves only at the end, on a stop, and where validation improves (`keep_best`)."""
    keep_last: Positive = 2
    """Newest checkpoints kept."""
    keep_every: Positive | None = None
    """Checkpoints of steps that are multiples of this are never removed."""
    keep_best: bool = True
    """Save where the validation loss is the lowest so far, and keep that one too."""
    asynchronous: bool = True
    """Write while the training goes on: it waits for a copy to host memory only, which is kept for the next save. The last save of
    a run, and the one after a stop signal, are waited for."""
    timeout_seconds: Annotated[float, Field(gt=0)] = 1800.0
    """How long ranks wait for each other while they save; the training's own time-out is run.timeout_seconds."""


class ElasticSection(Section):
    """What happens when a rank is lost: the ranks of this machine are started again and go on from the newest whole checkpoint."""

    max_restarts: NonNegative = 0
    """How often, in one call of `train`; 0 ends the run with the first loss."""
    min_ranks: Positive | None = None
    """After a generation that saved nothing new, go on with fewer ranks, down to this many, where the layout leaves a degree open
    and the global batch stays the same. Null starts as many as before."""

    @model_validator(mode="after")
    def _acts(self) -> ElasticSection:
        if self.min_ranks is not None and not self.max_restarts:
            raise ValueError("`min_ranks` is for restarts: give `max_restarts`, too")
        return self


class RunSection(Section):
    """The run folder and what is written there."""

    dir: str | None = None
    """Run folder; default `runs/<name>`."""
    log_every_steps: Positive = 1
    """Steps between lines of the log (events.jsonl has every step)."""
    sinks: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Optional sinks beside events.jsonl."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes CUDA where it is."""
    timeout_seconds: Annotated[float, Field(gt=0)] = 600.0
    """How long a collective may wait before the run is declared broken."""
    replica_check_every_steps: Positive | None = None
    """Steps between comparisons of the weights that several ranks hold alike; a difference ends the run before it is saved, and
    `elastic` goes back to the checkpoint before. Checked before every save, too. Null never checks."""


class Recipe(Section):
    """One training run, whole."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    """Names the run folder."""
    seed: NonNegative = 0
    """Initial weights, sample order and dropout are functions of it."""
    model: ModelSection
    tokenizer: TokenizerSection = TokenizerSection()
    data: DataSection
    training: TrainingSection
    optimizer: OptimizerSection = OptimizerSection()
    precision: Annotated[PrecisionSection, BeforeValidator(_as_precision)] = PrecisionSection()
    recompute: RecomputeKind = "none"
    """`selective` recomputes all but matrix products and attention in the backward pass; `full` whole blocks."""
    layout: Annotated[LayoutSection, BeforeValidator(_as_layout)] = LayoutSection()
    cluster: Annotated[ClusterSection | None, BeforeValidator(_as_cluster)] = None
    """What `layout: auto` plans for; default the devices of this machine."""
    moe: MoeSection = MoeSection()
    evaluation: EvaluationSection = EvaluationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    elastic: ElasticSection = ElasticSection()
    run: RunSection = RunSection()
