"""Trainers other than ours: what they hold per parameter, and what they take where a published row says nothing. Torch-free.

Sources are the trainers' own documents and code as of the measurements: nanotron v0.5; Megatron-Core 0.8 to 0.15 under NeMo;
Megatron-LM of 2020 and 2021; Megatron-DeepSpeed of BigScience; Composer 0.14 to 0.22 (llm-foundry); torchtitan; litgpt of 2023.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shardwright.config.schema import RecomputeKind
from shardwright.hardware import Accelerator
from shardwright.layout import Layout
from shardwright.layout.degrees import ZeroStage
from shardwright.planner.candidate import Engine


@dataclass(frozen=True)
class Framework:
    """One trainer: its engine, and its habits where a row is silent.

    `links` is what its published runs had between nodes, by accelerator generation, in words of the hardware catalogue.
    """

    engine: Engine
    earlier: Engine | None = None
    """What the release held with which the earlier of its published rows were made (`_made_earlier`), without a pipeline."""
    earlier_pipelined: Engine | None = None
    """The same in a pipeline, whose sends keep the host from running as far ahead."""
    since_2025: Engine | None = None
    """Where the releases that run on the accelerators of 2025 (H200, Blackwell) keep other things than those before."""
    zero_stage: ZeroStage = 1
    copies_adapted: bool = False
    """With adapters each rank holds the whole frozen model, unless a row says that it is sharded."""
    zero_stage_in_pipeline: ZeroStage | None = None
    """What a stated stage 3 is under pp: torchtitan gathers once per step there and keeps parameters whole between passes."""
    recompute: RecomputeKind = "none"
    recompute_varies: bool = False
    """Whether its published recipes choose it by the memory that is left, so that silence does not mean the habit."""
    recompute_of_quantised: RecomputeKind | None = None
    """Where it differs for QLoRA."""
    recompute_of_shards: RecomputeKind | None = None
    """Where it differs on several devices: litgpt's FSDP strategy recomputes whole blocks."""
    flash_attention: bool = True
    interleaves: bool = False
    """Whether its published pipelines hold several stages a rank where a row does not say."""
    sequence_parallel: bool = True
    links: Mapping[str, str] = field(default_factory=dict, hash=False)


_MIXED = Engine(weight_bytes=2.0, master_bytes=4.0, casts_at_use=False, stage_rule="even")
"""Half-precision weights beside fp32 master weights that are sharded with the optimizer's states."""

_FUSED_SOFTMAX_BYTES = 13.0
"""Megatron's kernel scales, masks and normalises at once: scores written and read, weights written, read and written by dropout
with a byte of its mask, and read by the second product; all in half precision."""

_DOUBLE_QUANTISED_BYTES = 0.5 + 1.0 / 64 + 4.0 / (64 * 256)
"""NF4 whose scales are quantised, too: 8 bits, and an fp32 one per 256 of them (arXiv 2305.14314)."""

_EAGER_LOGIT_BYTES = 14.0
"""transformers' loss: logits in bf16, an fp32 copy, their log-softmax, and the gradient of that."""

_HUGGING_FACE = Engine(
    "huggingface",
    gated_tensors=4.0,
    norm_tensors=4.0,
    logit_bytes=_EAGER_LOGIT_BYTES,
    nf4_bytes=_DOUBLE_QUANTISED_BYTES,
    unquantised_bytes=4.0,
    frozen_drops_inputs=True,
)


def _pure(engine: Engine) -> Engine:
    """Weights, gradients and states in bf16, and no others: 8 bytes a parameter."""
    return replace(engine, weight_bytes=2.0, gradient_bytes=2.0, half_states=True, casts_at_use=False)


# Gradients are summed in fp32 when a micro-batch's bf16 ones are whole (optim/gradient_accumulator.py). The activation of a gate is
# kept beside gate and up; gathered inputs and gathered gradients have a buffer each, as long as the run
# (parallel/tensor_parallel/functional.py). Logits: bf16, an fp32 copy, and its exponentials (models/llama.py). A norm keeps as much
# again as its input and output by what rows take that differ in micro batch and depth.
_NANOTRON = replace(
    _MIXED,
    name="nanotron",
    stage_rule="running_sum",
    gradient_bytes=4.0,
    fresh_gradient_bytes=2.0,
    reduce_bytes=4.0,
    whole_gradients=True,
    gated_tensors=4.0,
    norm_tensors=4.0,
    logit_bytes=10.0,
    sequence_buffers=2.0,
    keeps_gathered_sequence=False,
)

# Selective recomputation keeps every second product of a block, and attention's output: of a Llama's queries, values, gate and the
# branch's result, which the compiler knows that nobody reads.
_TORCHTITAN = Engine(
    "torchtitan",
    gather_bytes=2.0,
    reduce_bytes=4.0,
    selective_share=0.49,
    eager_selective_share=0.58,
    gradients_apart=True,
    logit_bytes=14.0,
    cut_logit_bytes=22.0,
    keeps_fp4_products=False,
    defers_stage_2=True,
    stage_rule="even",
)

FRAMEWORKS: dict[str, Framework] = {
    "nanotron": Framework(
        _NANOTRON,
        earlier=replace(_NANOTRON, waiting_sequences=56.0),
        earlier_pipelined=replace(_NANOTRON, waiting_sequences=26.0),
        links={"Hopper": "efa-p5"},
    ),
    "megatron-core": Framework(
        # Sums in fp32 go with bf16, but NVIDIA's performance recipes turn them off (`engine_of`).
        replace(_MIXED, name="megatron-core", gradient_bytes=4.0, reduce_bytes=4.0, whole_gradients=True, node_dispatch=True),
        recompute_varies=True,
        interleaves=True,
    ),
    "megatron-lm": Framework(
        replace(
            _MIXED, name="megatron-lm", gradient_bytes=4.0, reduce_bytes=4.0, whole_gradients=True, score_bytes=_FUSED_SOFTMAX_BYTES
        ),
        zero_stage=0,
        recompute="full",
        flash_attention=False,
        sequence_parallel=False,
    ),
    "megatron-deepspeed": Framework(
        # The step flattens a shard's gradients and casts them to fp32 (runtime/zero/stage_1_and_2.py), in one tensor each. Its
        # BF16_Optimizer keeps bf16 gradients beside their fp32 sums.
        replace(
            _MIXED,
            name="megatron-deepspeed",
            gradient_bytes=2.0,
            summed_apart=True,
            update_bytes=6.0,
            reduce_bytes=2.0,
            whole_gradients=True,
            score_bytes=_FUSED_SOFTMAX_BYTES,
        ),
        recompute="full",
        flash_attention=False,
        sequence_parallel=False,
    ),
    "aleph": Framework(
        # Logits: the local and the gathered ones in bf16, fp32 copy, exponentials, gradient, and that in bf16 twice again.
        replace(
            _MIXED,
            name="aleph",
            stage_rule="weighed",  # by parameters, embedding and head among them
            gradient_bytes=2.0,
            reduce_bytes=2.0,
            whole_gradients=True,
            whole_logits=True,
            logit_bytes=20.0,
            gated_tensors=4.0,
            rotary_tensors=2.0,
            norm_tensors=5.0,
        ),
        sequence_parallel=False,
    ),
    "llm-foundry": Framework(
        Engine("llm-foundry", gather_bytes=2.0, reduce_bytes=4.0, logit_bytes=6.0),
        zero_stage=3,
    ),
    "torchtitan": Framework(
        # Logits in bf16 and fp32, their exponentials and gradient; where the vocabulary is cut, shifted and log-softmax of them are
        # tensors of their own. Since 2025 the compiled loss keeps two of these. Pipelines sum whole gradients in fp32 until the
        # last micro-batch.
        _TORCHTITAN,
        since_2025=replace(_TORCHTITAN, logit_bytes=5.0, cut_logit_bytes=None, gradients_apart=False),
        zero_stage=3,
        zero_stage_in_pipeline=2,
        recompute="selective",
    ),
    "litgpt": Framework(
        Engine(
            "litgpt",
            weight_bytes=2.0,
            gradient_bytes=2.0,
            casts_at_use=False,
            gated_tensors=4.0,
            norm_tensors=3.0,
            loads_whole=True,
            nf4_bytes=_DOUBLE_QUANTISED_BYTES,
        ),
        zero_stage=3,
        recompute_of_shards="full",
        sequence_parallel=False,
    ),
    "deepspeed": Framework(
        # Under Hugging Face's models; what the step flattens and casts is Megatron-DeepSpeed's.
        replace(
            _MIXED,
            name="deepspeed",
            gradient_bytes=2.0,
            update_bytes=6.0,
            reduce_bytes=2.0,
            gather_bytes=2.0,
            gated_tensors=4.0,
            norm_tensors=4.0,
            logit_bytes=_EAGER_LOGIT_BYTES,
        ),
        zero_stage=3,
        recompute="full",
    ),
    "huggingface": Framework(
        # Trainer, TRL, PEFT and Accelerate: fp32 weights under autocast, whose casts live until the backward pass. RMS norms work
        # on an fp32 copy, which is kept; so is a gate's activation. Preparing a model for QLoRA casts all that is not quantised to
        # fp32 (peft's prepare_model_for_kbit_training).
        _HUGGING_FACE,
        zero_stage=3,
        copies_adapted=True,
        recompute_of_quantised="full",
        sequence_parallel=False,
    ),
    "llama-factory": Framework(
        # Its README has 18 bytes a parameter for full tuning of 7B with mixed precision, and 8 for "pure_bf16".
        replace(_HUGGING_FACE, name="llama-factory", unquantised_bytes=None),
        zero_stage=3,
        copies_adapted=True,
        recompute="full",
        sequence_parallel=False,
    ),
    "axolotl": Framework(
        # `bf16: true` loads weights in bf16 and trains them so; examples recompute, and keep logits of whole rows.
        _pure(replace(_HUGGING_FACE, name="axolotl")),
        zero_stage=3,
        copies_adapted=True,
        recompute="full",
        sequence_parallel=False,
    ),
    "torchtune": Framework(
        # `dtype: bf16` holds for weights, gradients and states. The loss projects, casts and reduces an eighth of the rows at a
        # time (LinearCrossEntropyLoss): bf16, fp32 and log-softmax of so many logits.
        _pure(
            Engine(
                "torchtune",
                gated_tensors=4.0,
                norm_tensors=3.0,
                logit_bytes=10.0 / 8,
                nf4_bytes=_DOUBLE_QUANTISED_BYTES,
                frozen_drops_inputs=True,
            )
        ),
        zero_stage=3,
        recompute="full",
        sequence_parallel=False,
    ),
    "automodel": Framework(
        # NeMo Automodel: transformers' models in bf16 under FSDP2, with kernels of its own for norms, gates and the loss.
        _pure(Engine("automodel", nf4_bytes=_DOUBLE_QUANTISED_BYTES, logit_bytes=4.0)),
        zero_stage=3,
        copies_adapted=True,
    ),
    "unsloth": Framework(
        # Kernels of its own keep no copies; the loss writes the gradient over bf16 logits; blocks' inputs wait on the host.
        replace(_HUGGING_FACE, name="unsloth", gated_tensors=3.0, norm_tensors=2.0, logit_bytes=4.0, unquantised_bytes=None),
        recompute="full",
        sequence_parallel=False,
    ),
    "gpt-neox": Framework(
        replace(_MIXED, name="gpt-neox", gradient_bytes=2.0, update_bytes=6.0, reduce_bytes=2.0, whole_gradients=True),
        recompute="full",
        sequence_parallel=False,
    ),
    "colossalai": Framework(
        # Gemini's gradients take the place of the weights that they are of: 14 bytes a parameter.
        replace(_MIXED, name="colossalai", gradient_bytes=0.0, reduce_bytes=2.0, gather_bytes=2.0, logit_bytes=_EAGER_LOGIT_BYTES),
        zero_stage=3,
        recompute="full",
        sequence_parallel=False,
    ),
}

_SIGNS: tuple[tuple[str, str], ...] = (
    (r"nanotron", "nanotron"),
    (r"megatron[-+]deepspeed|bigscience|bloom", "megatron-deepspeed"),
    (r"megascale", "megatron-core"),
    (r"megatron-lm|ptd\b", "megatron-lm"),
    (r"automodel", "automodel"),
    (r"nemo|megatron-core|megatron-bridge|dgxc", "megatron-core"),
    (r"llm-foundry|composer|mosaic", "llm-foundry"),
    (r"torchtune", "torchtune"),
    (r"torchtitan|fsdp2", "torchtitan"),
    (r"lit-?gpt|lightning", "litgpt"),
    (r"aleph", "aleph"),
    (r"unsloth", "unsloth"),
    (r"axolotl", "axolotl"),
    (r"llama-?factory", "llama-factory"),
    (r"gpt-?neox|eleuther", "gpt-neox"),
    (r"colossal", "colossalai"),
    (r"primus", "megatron-core"),
    (r"deepspeed|zero-3", "deepspeed"),
    (r"hugging ?face|transformers|\btrl\b|\bpeft\b|accelerate|q-?lora", "huggingface"),
)
"""Words by which a row names its trainer, the first that is found."""


def name_framework(*texts: str) -> str | None:
    """The trainer that one of the texts names, the first text first; None where none does.

    >>> name_framework("", "NVIDIA/NeMo docs"), name_framework("a table")
    ('megatron-core', None)
    """
    for text in texts:
        for pattern, name in _SIGNS:
            if re.search(pattern, text.lower()):
                return name
    return None


_PERFORMANCE_RECIPES = r"nemo(?!\S* automodel)|megatron-bridge|dgxc"
"""Tables of NVIDIA's."""


def follows_performance_recipe(*texts: str) -> bool:
    """Whether one of the texts names NVIDIA's performance recipes (scripts/performance of NeMo and of Megatron-Bridge).

    They set `grad_reduce_in_fp32 = False`, and adapt the fused queries, keys and values alone
    (`peft.target_modules = ["linear_qkv"]`).
    """
    return any(re.search(_PERFORMANCE_RECIPES, text.lower()) for text in texts)


_FIRST_ZERO_3 = r"2104\.04473|megatron-lm"
"""The paper that measured DeepSpeed's ZeRO-3 of 2021, which gathered one tensor after the other; later ones gather a bucket at
once."""


def engine_of(row: Mapping[str, str], framework: Framework, layout: Layout, accelerator: Accelerator) -> Engine:
    """How the row's trainer keeps things: its release's habits, and what the row's notes say of them."""
    recent = "Blackwell" in accelerator.generation or accelerator.name.startswith("H200")
    special = (framework.since_2025 if recent else None) or (
        (framework.earlier if layout.pp == 1 else framework.earlier_pipelined) if _made_earlier(layout) else None
    )
    engine = special or framework.engine
    if engine.name == "huggingface" and re.search(r"(?i)zero|deepspeed|\bds", row["notes.sharding"]):
        engine = FRAMEWORKS["deepspeed"].engine
    if row["notes.half_weights"] and engine.weight_bytes is None:
        engine = _pure(engine)
    if row["notes.mixed_precision"] == "PURE":
        engine = replace(engine, reduce_bytes=2.0)
    if "RMS kernel" in row["notes.kernel"]:
        engine = replace(engine, norm_tensors=2.0)  # one fused kernel keeps its input and its output
    if engine.name == "megatron-core" and follows_performance_recipe(row["notes.framework"], row["source"]):
        engine = replace(engine, gradient_bytes=2.0, reduce_bytes=2.0)
    if engine.name == "deepspeed" and re.search(_FIRST_ZERO_3, row["source"].lower()):
        engine = replace(engine, gathers_tensors=True)
    if row["notes.gradients"] and engine.gradient_bytes:
        beside = engine.gradient_bytes if engine.summed_apart else 0.0
        engine = replace(engine, gradient_bytes=4.0 + beside, reduce_bytes=4.0)
    return engine


def _made_earlier(layout: Layout) -> bool:
    """Whether a row of nanotron's table was made before gathered sequences had buffers of their own.

    The table was made in two rounds: scripts/scaling_benchmarks.py leaves out what the first has, but for pipelines that are older
    than a certain job. By the memory of its rows, pipelines of more than two stages on up to 128 GPUs were not made again, but for
    those with tensor parallelism over four nodes, which the first round did not have.
    """
    return layout.pp == 1 or (layout.pp > 2 and layout.tp <= 16 and layout.world_size <= 128)
