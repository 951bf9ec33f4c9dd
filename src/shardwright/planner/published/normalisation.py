"""Normalised fields of measurement tables: one spelling per value, "" if unstated.

Other tables contain `8,192`, `8k`, `4M tokens`, `BF16`, `bf16-mixed`, `ZeRO-3`, `True`, `n/a`
or nothing. Unreadable values count as unstated, like empty fields.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from math import inf

_SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_NUMBER = re.compile(
    r"^~?\s*([0-9][0-9,_ ]*(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)\s*([kmbt]?)(?:illion)?\b(.*)$"
)


def _find_meaning(word: str, meanings: Iterable[tuple[str, str]], default: str) -> str:
    """Return the meaning of the first pattern that matches the word."""
    return next((meaning for pattern, meaning in meanings if re.search(pattern, word)), default)


def normalise_number(text: str, *, is_binary: bool = False) -> str:
    """Return a number in digits, "" unless it is positive and finite. With `is_binary`, k is 1,024,
    as for sequence lengths.

    >>> normalise_number("8,192"), normalise_number("4M tokens"), normalise_number("n/a")
    ('8192', '4000000', '')
    >>> normalise_number("8K", is_binary=True)
    '8192'
    """
    match = _NUMBER.match(text.strip().lower())
    if match is None:
        return ""
    value = float(re.sub(r"[,_ ]", "", match[1])) * _SCALES[match[2]]
    if is_binary and match[2] == "k":
        value *= 1.024
    return f"{value:.12g}" if 0 < value < inf else ""


def normalise_count(text: str, *, is_binary: bool = False) -> str:
    """Return a number as `normalise_number` does, "" if it rounds to 0.

    >>> normalise_count("16.0"), normalise_count("0.4"), normalise_count("1e400")
    ('16', '', '')
    """
    number = normalise_number(text, is_binary=is_binary)
    return number if round(float(number or 0)) else ""


def normalise_billions(text: str) -> str:
    """Return parameters in billions, from `70b`, `70`, `70e9` or `7,000,000,000`.

    >>> [normalise_billions(text) for text in ("70B", "1.34", "8e9", "350M")]
    ['70', '1.34', '8', '0.35']
    """
    number = normalise_number(text)
    value = float(number or 0)
    return f"{value / 1e9:.12g}" if value >= 1e6 else number


def normalise_yes_no(text: str) -> str:
    """Return `yes` or `no`, also for the name of an attention kernel.

    >>> texts = ("True", "off", "flash-attn 2", "no flash attention", "yes (SDPA)", "unknown")
    >>> [normalise_yes_no(text) for text in texts]
    ['yes', 'no', 'yes', 'no', 'yes', '']
    """
    word = text.strip().lower()
    if re.match(
        r"(no|n|false|0|0\.0|off|none|disabled|without|w/o|eager|math|naive|vanilla)\b", word
    ):
        return "no"
    kernels = (
        r"(fa|flash|v)[-_ ]*(attn|attention)?[-_ ]*v?[1-4]?\b"
        r"|sdpa|xformers|memory.efficient|torch\.?compile|te$|cudnn|triton"
    )
    return "yes" if re.match(rf"(yes|y|true|1|1\.0|on|enabled)\b|{kernels}", word) else ""


def normalise_recompute(text: str) -> str:
    """Return `none`, `selective` or `full`.

    >>> texts = ("True", "off", "Selective", "full-uniform", "gradient checkpointing", "unknown")
    >>> [normalise_recompute(text) for text in texts]
    ['full', 'none', 'selective', 'full', 'full', '']
    >>> texts = ("no activation checkpointing", "gradient_checkpointing=False")
    >>> [normalise_recompute(text) for text in texts]
    ['none', 'none']
    """
    word = text.strip().lower()
    meanings = (
        (r"^(no|without|w/o)\b|\b(false|off|none|disabled)\b", "none"),
        (r"selective|partial|core|attention|\bsac\b|\bop\b", "selective"),
        (r"full|block|uniform|every|all|checkpoint|ckpt|recomp|^ac\b", "full"),
    )
    return _find_meaning(
        word, meanings, {"yes": "full", "no": "none"}.get(normalise_yes_no(word), "")
    )


def normalise_precision(text: str) -> str:
    """Return `fp64`, `fp32`, `bf16`, `fp16`, `fp8` or `nvfp4`. Mixed precision counts as the
    precision of its matmuls.

    >>> texts = ("BF16", "bf16-mixed", "FP8-MX", "NVFP4", "half", "tf32", "amp")
    >>> [normalise_precision(text) for text in texts]
    ['bf16', 'bf16', 'fp8', 'nvfp4', 'fp16', 'fp32', '']
    """
    word = text.strip().lower()
    meanings = (
        (r"fp4|float4|e2m1", "nvfp4"),
        (r"fp8|float8|e4m3|e5m2", "fp8"),
        (r"bf16|bfloat|brain", "bf16"),
        (r"fp16|float16|half|^16$|^o[12]$", "fp16"),
        (r"64", "fp64"),
        (r"32|single|full", "fp32"),
    )
    return _find_meaning(word, meanings, "")


def normalise_zero_stage(text: str) -> str:
    """Return `0` to `3`: 3 if fully sharded, 0 if replicated.

    >>> texts = ("ZeRO-3", "3.0", "FSDP", "DDP", "distributed optimizer", "unknown")
    >>> [normalise_zero_stage(text) for text in texts]
    ['3', '3', '3', '0', '1', '']
    >>> texts = ("FSDP2", "HYBRID_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "ZeRO++", "stage2_offload")
    >>> [normalise_zero_stage(text) for text in texts]
    ['3', '3', '2', '0', '3', '2']
    """
    word = re.sub(r"fsdp[ _-]?v?[12]\b", "fsdp", text.strip().lower())
    if match := re.search(r"[0-3](?![0-9])", re.sub(r"\.0$", "", word)):
        return match[0]
    meanings = (
        (r"grad", "2"),
        (r"fsdp|hsdp|full|hybrid|zero(\+\+|-inf)|mics", "3"),
        (r"distributed.?opt|dist.?opt|optimizer.?state", "1"),
        (r"ddp|none|no(?![a-z])", "0"),
    )
    return _find_meaning(word, meanings, "")


def normalise_task(text: str) -> str:
    """Return `lora`, `qlora`, `dpo` (with a reference model) or `rollouts`. All other tasks
    train all weights on given rows.

    >>> [normalise_task(text) for text in ("LoRA SFT", "Q-LoRA", "pretraining", "DPO", "GRPO")]
    ['lora', 'qlora', 'pretraining', 'dpo', 'rollouts']
    """
    word = text.strip().lower()
    meanings = (
        (r"q-?lora", "qlora"),
        (r"lora|peft|\bdora|adapter", "lora"),
        (r"ppo|grpo|rlhf|rloo|reinforce|online", "rollouts"),
        (r"\bdpo|\bipo\b|\bkto|preference", "dpo"),
    )
    return _find_meaning(word, meanings, word)


def normalise_accelerator(text: str) -> str:
    """Return the name without a count: `8x H100` is H100. "" if unstated.

    >>> texts = ("8xH100-80GB", "1 x A10 (24GB)", "NVIDIA H100 × 8", "16 A100 GPUs", "n/a")
    >>> [normalise_accelerator(text) for text in texts]
    ['H100-80GB', 'A10 (24GB)', 'NVIDIA H100', 'A100 GPUs', '']
    """
    name = re.sub(r"^\s*\d+\s*(?:[xX*×]\s*|\s+(?=[A-Za-z]))|\s+[xX*×]\s*\d+\s*$", "", text).strip()
    return (
        ""
        if re.fullmatch(r"n/?a|none|unknown|unspecified|not (stated|reported)|[-?]*", name.lower())
        else name
    )


_INTEGER_COLUMNS = (
    "layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab", "num_experts", "top_k", "gpus",
    "gpus_per_node", "tp", "pp", "cp", "ep", "dp", "virtual_pp", "micro_batch", "global_batch",
)  # fmt: skip
_NORMALISERS: dict[str, Callable[[str], str]] = {
    **dict.fromkeys(_INTEGER_COLUMNS, normalise_count),
    "seq_len": lambda text: normalise_count(text, is_binary=True),
    "params_b": normalise_billions,
    "gpu": normalise_accelerator,
    "precision": normalise_precision,
    "recompute": normalise_recompute,
    "zero_stage": normalise_zero_stage,
    "sequence_parallel": normalise_yes_no,
    "flash_attention": normalise_yes_no,
    "compile": normalise_yes_no,
    "task": normalise_task,
}
_MAX_GLOBAL_BATCH_ROWS = 1 << 18
"""A larger global batch counts tokens, whatever it states: no run had that many rows per
step."""


def normalise_row(row: Mapping[str, str]) -> dict[str, str]:
    """Return the row with normalised fields. Fields without a normaliser stay unchanged."""
    normalised = {
        name: _NORMALISERS[name](text) if name in _NORMALISERS else text
        for name, text in row.items()
    }
    batch = float(normalised.get("global_batch") or 0)
    length = float(normalised.get("seq_len") or 0)
    if batch and ("token" in row["global_batch"].lower() or batch > _MAX_GLOBAL_BATCH_ROWS):
        normalised["global_batch"] = str(max(1, round(batch / length))) if length else ""
    return normalised
