"""Settings read from a row's notes by regular expressions.

Notes also state how a run ended. `read_notes` only returns text that matches one of the
patterns.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from shardwright.planner.published.normalisation import (
    normalise_recompute,
    normalise_yes_no,
    normalise_zero_stage,
)

_NOT_PATTERN = r"(?<!no )(?<!not )(?<!without )(?<!w/o )"
_IS_PATTERN = r"\s*(?:=|:|\s|of)\s*"

NOTE_PATTERNS: dict[str, str] = {
    "framework": (
        r"(nanotron|NeMo/Megatron-Core|NeMo \d|Megatron-DeepSpeed|Megatron\+DeepSpeed"
        r"|FSDP mixed_precision|MegaScale|^ZeRO-3"
        r"|(?i:\b(?:torchtitan|torchtune|lit-?gpt|llm-foundry|composer|megatron(?:-lm|-core)?"
        r"|deepspeed|unsloth|axolotl|llama-?factory|trl|peft|hugging ?face|transformers"
        r"|accelerate|colossal-?ai|olmo-core|primus|gpt-neox|fairscale|lightning)\b))"
    ),
    "kernel": r"kernel=([\w. +]+?)(?:;|$)",
    "embeddings": r"\b(tied|untied) embeddings",
    "mixed_precision": r"mixed_precision=(\w+)",
    "local_batch": r"local batch (\d+)",
    "micro_batch": (
        r"(?i)(?:per[_ -]?(?:device|gpu)[_ -]?(?:train[_ -]?)?batch(?:[_ -]?size)?"
        r"|(?:micro|device)[_ -]?batch(?:[_ -]?size)?|\bmbs"
        rf"|batch(?:[_ -]?size)? per (?:gpu|device)){_IS_PATTERN}(\d+)"
    ),
    "grad_accum": (
        r"(?i)(?:grad(?:ient)?[_ -]?acc(?:um\w*)?(?:[_ -]?steps?)?|\bGAS?)"
        rf"{_IS_PATTERN}(\d+)"
    ),
    "expert_width": r"MoE expert FFN=(\d+)",
    "async_tp": r"(AsyncTP|TP-comm overlap)",
    "scaling": r"\b(rowwise|tensorwise|MXFP8|NVFP4|FP8-CS|FP8-MX)\b",
    "fp4_layers": r"NVFP4 layers 0-(\d+)",
    "schedule": r"((?i:interleaved))(?: 1F1B| schedule)",
    "selective": r"(op-level SAC|selective op AC|selective layer AC|selective AC)",
    "checkpointing": (
        r"(?i)((?:no |without |w/o |full |selective )?(?:gradient|activation|grad)"
        r"[_ -]?(?:checkpointing|checkpoints?|ckpt|recompute|recomputation)\b"
        r"(?!\s+(?:settings?|not|un))"
        r"(?:\s*[=:]\s*|\s+(?=(?:on|off|true|false|none|full|selective)\b))?"
        r"(?:on|off|true|false|none|full|selective)?)"
    ),
    "attention": (
        r"(?i)((?:no |without |w/o )?(?:flash[_ -]?att\w*(?:[ -]?[1-4])?|\bFA[- ]?[234]\b"
        r"|\bsdpa\b|xformers|memory[- ]efficient attention)|eager attention)"
    ),
    "padding_mask": r"(?i)\b(padding mask)\b",
    "no_autocast": r"(?i)\b(no autocast)\b",
    "sharding": (
        r"(?i)\b(ZeRO[- ]?(?:stage[- ]?)?[0-3]|(?:DeepSpeed|DS)[- ]?(?:stage|Z)[- ]?[0-3]"
        r"|FULL_SHARD|SHARD_GRAD_OP|NO_SHARD|HYBRID_SHARD|HSDP|FSDP2?|DDP)\b"
    ),
    "within_node": r"(?i)\b(HSDP|HYBRID[_ ]SHARD\w*|hybrid shard\w*|MiCS|hpZ)\b",
    "optimizer": (
        r"(?i)\b((?:paged[_ ]?)?adamw?[_ -]?8[_ -]?bit|8[- ]?bit[ _-]?(?:adamw?|optimi[sz]er)"
        r"|adafactor|lion|muon|sgd|(?:paged[_ ]?)?\w*adamw?\w*)\b"
    ),
    "tensor": r"\bTP[ =]?(\d+)\b",
    "pipeline": r"\bPP[ =]?(\d+)\b",
    "model_parallel": r"model-parallel size t\*p=(\d+)",
    "quantization": r"(?i)\b(nf4|int4|4[- ]?bit)\b(?!\s*(?:adam|optim))",
    "paged": r"(?i)\b(paged)[_ -]?adamw?",
    "fused_update": r"(?i)(optimi[sz]er(?: step)?[ _]in[ _](?:the )?(?:backward|bwd))",
    "gptq": r"(?i)\b(gptq)\b",
    "trainable": r"trainable ([\d,]+)",
    "adapter": rf"(?i){_NOT_PATTERN}\b(QLoRA|LoRA|DoRA|rsLoRA)\b",
    "rank": r"(?i)\b(?:lora[_ -]?)?(?:r|rank|dim)\s*(?:=|:|\s)\s*(\d{1,4})\b",
    "targets": (
        r"(?i)(all[- ](?:linear|projections|modules)"
        r"|(?:[qkvo](?:_proj)?\s*[,/+&]\s*)+[qkvo](?:_proj)?\b|\bqkvo?\b"
        r"|(?:attention|attn)[- ]only|mlp[- ]only)"
    ),
    "gradients": r"(fp32 grad accumulation)",
    "offload": (
        rf"((?i:{_NOT_PATTERN}(?:CPU|optim\w*|param\w*|Adam|zero)[_ -]?offload\w*"
        r"|offload[_ -]?(?:optim|param)\w*|ZeRO-(?:Off|Inf)\w*))"
    ),
    "activation_offload": (
        rf"(?i)({_NOT_PATTERN}(?:activations?|checkpoints?|ckpt)"
        r"[ _-](?:checkpoints?[ _-])?(?:CPU[ _-])?offload\w*)"
    ),
    "chunked_loss": (
        r"(?i)(liger|fused[- ]linear[- ]cross|cut[- ]cross[- ]entropy"
        r"|(?:chunked|tiled)[- ](?:cross[- ]entropy|loss|logits|CE)\b)"
    ),
    "fabric": (
        r"(\bEFA\b|\d+xOmni-Path \d+Gbps|\d+x\d+Gbps IB/node"
        r"|interconnect \d+Gbps RoCE/node(?: n/a)?)"
    ),
    "half_weights": (
        r"(?i)(bf16[- ]true|\b(?:pure|full|all)[_ -]bf16\b|everything in bf16"
        r"|\bstates?(?: are| is)?(?: all)? in bf16|\bbf16 (?:adamw?|optimi[sz]er)(?: states?)?\b"
        r"|\bbf16 (?:moments|optimi[sz]er states?|states?)\b)"
    ),
    "release": r"\b(2\d\.\d\d(?:\.\d+)?) NeMo",
    "torch_release": r"(?i)\b(?:py)?torch[ =v]*2\.(\d+)\b",
    "expert_tensor": r"\bETP=(\d+)",
    "dispatch": r"(?i)\b(DeepEP|HybridEP)\b",
    "routing": r"\b(tokendrop)\b",
    "without_prediction": r"(w/o MTP)",
}
"""Pattern of each setting in `notes` (kernel, framework and its settings). The first group is
the value."""


def read_notes(notes: str) -> dict[str, str]:
    """Return the value of every key of `NOTE_PATTERNS`, "" if it is not in the notes.

    >>> values = read_notes("OOM; QLoRA r=64, all-linear; paged_adamw_8bit; mbs 2 x grad accum 8")
    >>> keys = ("adapter", "rank", "targets", "optimizer", "micro_batch", "grad_accum")
    >>> [values[key] for key in keys]
    ['QLoRA', '64', 'all-linear', 'paged_adamw_8bit', '2', '8']
    >>> read_notes("no gradient checkpointing")["checkpointing"]
    'no gradient checkpointing'
    """
    matches = {key: re.search(pattern, notes) for key, pattern in NOTE_PATTERNS.items()}
    return {key: match[1].strip() if match else "" for key, match in matches.items()}


def read_note_columns(row: Mapping[str, str]) -> dict[str, str]:
    """Return settings that columns state in the words of notes: `HYBRID_SHARD` as a ZeRO stage,
    `nf4` as a precision."""
    return {
        "notes.within_node": read_notes(row["zero_stage"])["within_node"]
        or row["notes.within_node"],
        "notes.quantization": read_notes(row["precision"])["quantization"]
        or row["notes.quantization"],
    }


def fill_from_notes(row: Mapping[str, str]) -> dict[str, str]:
    """Fill empty columns of a normalised row from its notes."""
    from_notes = {
        "recompute": normalise_recompute(row["notes.checkpointing"]),
        "zero_stage": normalise_zero_stage(row["notes.sharding"]),
        "flash_attention": normalise_yes_no(row["notes.attention"]),
        "micro_batch": row["notes.micro_batch"],
        "tp": row["notes.tensor"],
        "pp": row["notes.pipeline"],
    }
    return {**row, **{column: row[column] or value for column, value in from_notes.items()}}
