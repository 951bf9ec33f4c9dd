"""Readers of the families with experts: config.json -> ModelShape, transformers' defaults."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shardwright.architecture import names
from shardwright.architecture.experts import ExpertShape
from shardwright.architecture.fields import Fields
from shardwright.architecture.latent import LatentShape
from shardwright.architecture.llama_like import (
    read_biases,
    read_layer_types,
    read_llama_like,
    read_one_window,
)
from shardwright.architecture.positions import read_rope_of_model, yarn_temperature
from shardwright.architecture.shape import ModelShape
from shardwright.errors import ArchitectureError


def _experts(
    fields: Fields, *, count: str, per_token: int | None, coefficient: float | None, **more: Any
) -> ExpertShape:
    """Read the fields that the sparse families share; `more` are fields of `ExpertShape`."""
    num_experts = _num_experts(fields, count)
    experts_per_token = fields.integer("num_experts_per_tok", per_token)
    if experts_per_token > num_experts:
        raise ArchitectureError(
            "a token cannot use more experts than the model has",
            field="num_experts_per_tok",
            got=experts_per_token,
            allowed=f"1 to {num_experts} ({count})",
        )
    # An option of the forward pass's outputs; here the recipe decides about the balance loss.
    fields.flag("output_router_logits", False)
    if coefficient is not None:
        coefficient = fields.number("router_aux_loss_coef", coefficient)
    return ExpertShape(num_experts, experts_per_token, balance_loss_coefficient=coefficient, **more)


def _num_experts(fields: Fields, count: str) -> int:
    """Read the number of experts from the family's field `count` or transformers' aliases."""
    present = [
        name
        for name in (count, "num_local_experts", "num_experts")
        if fields.take(name) is not None
    ]
    numbers = {fields.integer(name) for name in present or [count]}
    if len(numbers) > 1:
        raise ArchitectureError(
            f"{' and '.join(dict.fromkeys(present))} contradict each other",
            field=present[1],
            got=str(sorted(numbers)),
        )
    return numbers.pop()


def _sparse(
    shape: ModelShape, experts: ExpertShape, sparse: list[bool] | None = None
) -> ModelShape:
    """Add experts to the layers with True in `sparse`, or to all layers."""
    layers = tuple(
        replace(layer, sparse=sparse is None or sparse[i]) for i, layer in enumerate(shape.layers)
    )
    return replace(shape, experts=experts, layers=layers)


def _mixtral(fields: Fields) -> ModelShape:
    shape = read_one_window(
        fields, read_llama_like(fields, theta=1e6, eps=1e-5, kv_heads_default=False), None
    )
    fields.only(
        "router_jitter_noise", (0, 0.0, None), "random noise in the router is not reproducible"
    )
    inner = shape.intermediate_size
    experts = _experts(
        fields, count="num_local_experts", per_token=2, coefficient=0.001, intermediate_size=inner
    )
    return _sparse(replace(shape, names=names.MIXTRAL), experts)


def _qwen3_moe(fields: Fields) -> ModelShape:
    shape = read_biases(fields, read_llama_like(fields, kv_heads_default=False), mlp=False)
    experts = _experts(
        fields,
        count="num_experts",
        per_token=8,
        coefficient=0.001,
        intermediate_size=fields.integer("moe_intermediate_size"),
        normalised=fields.flag("norm_topk_prob", False),
    )
    period = fields.integer("decoder_sparse_step", 1)
    dense = fields.take("mlp_only_layers") or []
    if not isinstance(dense, list) or any(
        not isinstance(item, int) or isinstance(item, bool) for item in dense
    ):
        raise ArchitectureError(
            "wrong value",
            field="mlp_only_layers",
            got=repr(dense),
            allowed="a list of layer numbers",
        )
    sparse = [i not in dense and (i + 1) % period == 0 for i in range(shape.num_layers)]
    shape = _one_window_if_used(fields, replace(shape, qk_norm="head"))
    return _sparse(shape, experts, sparse)


def _one_window_if_used(fields: Fields, shape: ModelShape) -> ModelShape:
    """Read one window for all layers if `use_sliding_window` is set."""
    fields.take("max_window_layers")  # in files, but without effect
    if fields.flag("use_sliding_window", False):
        return read_one_window(fields, shape, 4096)
    fields.take("sliding_window")
    return shape


def _olmoe(fields: Fields) -> ModelShape:
    shape = read_biases(fields, read_llama_like(fields, eps=1e-5, pad=1), mlp=False)
    fields.only("clip_qkv", (None,), "clipping of queries, keys and values is not supported")
    experts = _experts(
        fields,
        count="num_experts",
        per_token=8,
        coefficient=0.01,
        intermediate_size=shape.intermediate_size,
        normalised=fields.flag("norm_topk_prob", False),
    )
    return _sparse(replace(shape, qk_norm="full"), experts)


_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""transformers' defaults for files without rope fields."""


def _gpt_oss(fields: Fields) -> ModelShape:
    if not fields.take("rope_parameters") and not fields.take("rope_scaling"):
        fields.assume("rope_parameters", dict(_GPT_OSS_ROPE))
    shape = read_llama_like(fields, theta=150_000.0, head_dim=64, eps=1e-5)
    fields.take("hidden_act")  # without effect: the experts have their own clamped activation
    fields.take("initial_context_length")  # an older name of the rope's original positions
    fields.take("experts_per_token")  # an older name of num_experts_per_tok, present beside it
    experts = _experts(
        fields,
        count="num_local_experts",
        per_token=4,
        coefficient=0.001,
        intermediate_size=shape.intermediate_size,
        router_bias=True,
        expert_bias=True,
        matrix_layout="in_out",
        gate_up_layout="interleaved",
        swiglu_limit=fields.number("swiglu_limit", 7.0, exclusive=True),
        swiglu_gain=fields.number("swiglu_alpha", 1.702, exclusive=True),
    )
    bias = fields.flag("attention_bias", True)
    kinds = [
        "sliding_attention" if (i + 1) % 2 else "full_attention" for i in range(shape.num_layers)
    ]
    shape = replace(
        shape, names=names.GPT_OSS, qkv_bias=bias, attention_out_bias=bias, attention_sinks=True
    )
    return _sparse(
        read_layer_types(fields, shape, kinds, fields.integer("sliding_window", 128)), experts
    )


def _deepseek_v3(fields: Fields) -> ModelShape:
    latent = LatentShape(
        query_rank=None
        if "q_lora_rank" in fields and fields.take("q_lora_rank") is None
        else fields.integer("q_lora_rank", 1536),
        key_value_rank=fields.integer("kv_lora_rank", 512),
        nope_dim=fields.integer("qk_nope_head_dim", 128),
        rope_dim=fields.integer("qk_rope_head_dim", 64),
        value_dim=fields.integer("v_head_dim", 128),
        interleaved=fields.flag("rope_interleave", True),
    )
    for name, value in (
        ("head_dim", latent.rope_dim),
        ("qk_head_dim", latent.nope_dim + latent.rope_dim),
    ):
        fields.only(
            name,
            (value,),
            "transformers computes this from the parts of a head and ignores the field",
        )
    max_positions = fields.integer("max_position_embeddings")
    rope = read_rope_of_model(fields, latent.rope_dim, max_positions, theta=10_000.0)
    head_dim = latent.nope_dim + latent.rope_dim
    shape = read_llama_like(
        fields, head_dim=head_dim, fixed_head_dim=True, ropes=(rope,), kv_heads_default=False
    )
    if shape.num_kv_heads != shape.num_heads:
        raise ArchitectureError(
            "latent attention needs as many key heads as query heads",
            field="num_key_value_heads",
            got=shape.num_kv_heads,
            allowed=str(shape.num_heads),
        )
    bias = fields.flag("attention_bias", False)
    scale = _latent_scale(fields, shape.head_dim)
    moe_inner = fields.integer("moe_intermediate_size", 2048)
    num_experts = _num_experts(fields, "n_routed_experts")
    experts = _experts(
        fields,
        count="n_routed_experts",
        per_token=8,
        coefficient=None,
        intermediate_size=moe_inner,
        shared_intermediate_size=moe_inner * fields.integer("n_shared_experts", 1, minimum=0),
        score="sigmoid",
        normalised=fields.flag("norm_topk_prob", True),
        weight_scale=fields.number("routed_scaling_factor", 2.5, exclusive=True),
        balance_bias=True,
        **_groups(fields, num_experts, fields.integer("num_experts_per_tok", 8)),
    )
    fixed_values = {
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "ep_size": 1,
    }
    for name, fixed_value in fixed_values.items():
        fields.only(name, (fixed_value, None), "only this value is supported for this family")
    for name in ("aux_loss_alpha", "seq_aux"):
        fields.take(name)  # in older files; here the recipe decides about the balance loss
    # Multi-token prediction modules are not part of the model that transformers trains; files
    # store their weights separately.
    if fields.take("num_nextn_predict_layers", 1) != 0:
        fields.amended["num_nextn_predict_layers"] = 0
    first = fields.integer("first_k_dense_replace", 3, minimum=0)
    shape = replace(
        shape,
        latent=latent,
        num_kv_heads=shape.num_heads,
        qkv_bias=bias,
        attention_out_bias=bias,
        layers=tuple(replace(layer, attention_scale=scale) for layer in shape.layers),
    )
    return _sparse(shape, experts, [i >= first for i in range(shape.num_layers)])


def _latent_scale(fields: Fields, head_dim: int) -> float:
    """Compute 1 / sqrt(head_dim), times YaRN's squared factor if `mscale_all_dim` is set."""
    rope = fields.take("rope_parameters") or fields.take("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    mscale = rope.get("mscale_all_dim") or 0
    scale = 1.0 / math.sqrt(head_dim)
    if kind == "default" or not mscale:
        return scale
    return scale * yarn_temperature(float(rope["factor"]), float(mscale)) ** 2


def _groups(fields: Fields, num_experts: int, experts_per_token: int) -> dict[str, int]:
    """Read the number of expert groups (nodes of the original training) and groups per
    token.
    """
    num_groups = fields.integer("n_group", 8)
    per_token = fields.integer("topk_group", 4)
    if num_experts % num_groups or num_experts // num_groups < 2:
        raise ArchitectureError(
            "expert groups must have equal sizes of at least two experts",
            field="n_group",
            got=num_groups,
            allowed=f"a divisor of the {num_experts} experts, at most {num_experts // 2}",
        )
    if per_token > num_groups or per_token * (num_experts // num_groups) < experts_per_token:
        raise ArchitectureError(
            "the groups of a token must contain at least num_experts_per_tok experts",
            field="topk_group",
            got=per_token,
            allowed=f"{math.ceil(experts_per_token * num_groups / num_experts)} to {num_groups}",
        )
    return {"num_groups": num_groups, "groups_per_token": per_token}


SPARSE_FAMILIES: dict[str, Callable[[Fields], ModelShape]] = {
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "olmoe": _olmoe,
    "gpt_oss": _gpt_oss,
    "deepseek_v3": _deepseek_v3,
}
"""Readers by `model_type`."""
