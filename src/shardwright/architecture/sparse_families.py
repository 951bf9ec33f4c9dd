"""Readers of the families with experts: config.json -> ModelShape, transformers' defaults."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shardwright.architecture import module_names
from shardwright.architecture.config_fields import ConfigFields
from shardwright.architecture.expert_shape import ExpertShape
from shardwright.architecture.latent_shape import LatentShape
from shardwright.architecture.llama_like import (
    read_biases,
    read_layer_types,
    read_llama_like,
    read_single_window,
)
from shardwright.architecture.model_shape import ModelShape
from shardwright.architecture.rope_config import compute_yarn_temperature, read_rope
from shardwright.errors import ArchitectureError


def _read_experts(
    fields: ConfigFields,
    *,
    count_field: str,
    per_token: int | None,
    coefficient: float | None,
    **extra: Any,
) -> ExpertShape:
    """Read the fields that the sparse families share; `extra` are fields of `ExpertShape`."""
    num_experts = _read_num_experts(fields, count_field)
    experts_per_token = fields.read_integer("num_experts_per_tok", per_token)
    if experts_per_token > num_experts:
        raise ArchitectureError(
            "a token cannot use more experts than the model has",
            field="num_experts_per_tok",
            got=experts_per_token,
            allowed=f"1 to {num_experts} ({count_field})",
        )
    # An option of the forward pass's outputs; here the recipe decides about the balance loss.
    fields.read_flag("output_router_logits", False)
    if coefficient is not None:
        coefficient = fields.read_number("router_aux_loss_coef", coefficient)
    return ExpertShape(
        num_experts, experts_per_token, balance_loss_coefficient=coefficient, **extra
    )


def _read_num_experts(fields: ConfigFields, count_field: str) -> int:
    """Read the number of experts from the family's field `count_field` or transformers' aliases."""
    present = [
        name
        for name in (count_field, "num_local_experts", "num_experts")
        if fields.read(name) is not None
    ]
    numbers = {fields.read_integer(name) for name in present or [count_field]}
    if len(numbers) > 1:
        raise ArchitectureError(
            f"{' and '.join(dict.fromkeys(present))} contradict each other",
            field=present[1],
            got=str(sorted(numbers)),
        )
    return numbers.pop()


def _add_experts(
    shape: ModelShape, experts: ExpertShape, is_sparse: list[bool] | None = None
) -> ModelShape:
    """Add experts to the layers with True in `is_sparse`, or to all layers."""
    layers = tuple(
        replace(layer, sparse=is_sparse is None or is_sparse[i])
        for i, layer in enumerate(shape.layers)
    )
    return replace(shape, experts=experts, layers=layers)


def _read_mixtral(fields: ConfigFields) -> ModelShape:
    shape = read_single_window(
        fields, read_llama_like(fields, theta=1e6, eps=1e-5, kv_heads_default=False), None
    )
    fields.require_value(
        "router_jitter_noise", (0, 0.0, None), "random noise in the router is not reproducible"
    )
    inner = shape.intermediate_size
    experts = _read_experts(
        fields,
        count_field="num_local_experts",
        per_token=2,
        coefficient=0.001,
        intermediate_size=inner,
    )
    return _add_experts(replace(shape, names=module_names.MIXTRAL), experts)


def _read_qwen3_moe(fields: ConfigFields) -> ModelShape:
    shape = read_biases(
        fields, read_llama_like(fields, kv_heads_default=False), has_mlp_bias_field=False
    )
    experts = _read_experts(
        fields,
        count_field="num_experts",
        per_token=8,
        coefficient=0.001,
        intermediate_size=fields.read_integer("moe_intermediate_size"),
        normalised=fields.read_flag("norm_topk_prob", False),
    )
    period = fields.read_integer("decoder_sparse_step", 1)
    dense = fields.read("mlp_only_layers") or []
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
    shape = _read_optional_window(fields, replace(shape, qk_norm="head"))
    return _add_experts(shape, experts, sparse)


def _read_optional_window(fields: ConfigFields, shape: ModelShape) -> ModelShape:
    """Read one window for all layers if `use_sliding_window` is set."""
    fields.read("max_window_layers")  # in files, but without effect
    if fields.read_flag("use_sliding_window", False):
        return read_single_window(fields, shape, 4096)
    fields.read("sliding_window")
    return shape


def _read_olmoe(fields: ConfigFields) -> ModelShape:
    shape = read_biases(fields, read_llama_like(fields, eps=1e-5, pad=1), has_mlp_bias_field=False)
    fields.require_value(
        "clip_qkv", (None,), "clipping of queries, keys and values is not supported"
    )
    experts = _read_experts(
        fields,
        count_field="num_experts",
        per_token=8,
        coefficient=0.01,
        intermediate_size=shape.intermediate_size,
        normalised=fields.read_flag("norm_topk_prob", False),
    )
    return _add_experts(replace(shape, qk_norm="full"), experts)


_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""transformers' defaults for files without rope fields."""


def _read_gpt_oss(fields: ConfigFields) -> ModelShape:
    if not fields.read("rope_parameters") and not fields.read("rope_scaling"):
        fields.override("rope_parameters", dict(_GPT_OSS_ROPE))
    shape = read_llama_like(fields, theta=150_000.0, head_dim=64, eps=1e-5)
    fields.read("hidden_act")  # without effect: the experts have their own clamped activation
    fields.read("initial_context_length")  # an older name of the rope's original positions
    fields.read("experts_per_token")  # an older name of num_experts_per_tok, present as well
    experts = _read_experts(
        fields,
        count_field="num_local_experts",
        per_token=4,
        coefficient=0.001,
        intermediate_size=shape.intermediate_size,
        router_bias=True,
        expert_bias=True,
        matrix_layout="in_out",
        gate_up_layout="interleaved",
        swiglu_limit=fields.read_number("swiglu_limit", 7.0, is_exclusive=True),
        swiglu_gain=fields.read_number("swiglu_alpha", 1.702, is_exclusive=True),
    )
    bias = fields.read_flag("attention_bias", True)
    kinds = [
        "sliding_attention" if (i + 1) % 2 else "full_attention" for i in range(shape.num_layers)
    ]
    shape = replace(
        shape,
        names=module_names.GPT_OSS,
        qkv_bias=bias,
        attention_out_bias=bias,
        attention_sinks=True,
    )
    return _add_experts(
        read_layer_types(fields, shape, kinds, fields.read_integer("sliding_window", 128)), experts
    )


def _read_deepseek_v3(fields: ConfigFields) -> ModelShape:
    latent = _read_latent_shape(fields)
    max_positions = fields.read_integer("max_position_embeddings")
    rope = read_rope(fields, latent.rope_dim, max_positions, theta=10_000.0)
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
    bias = fields.read_flag("attention_bias", False)
    scale = _compute_latent_scale(fields, shape.head_dim)
    experts = _read_deepseek_experts(fields)
    # Multi-token prediction modules are not part of the model that transformers trains; files
    # store their weights separately.
    if fields.read("num_nextn_predict_layers", 1) != 0:
        fields.amended_fields["num_nextn_predict_layers"] = 0
    first = fields.read_integer("first_k_dense_replace", 3, minimum=0)
    shape = replace(
        shape,
        names=module_names.DEEPSEEK_V3,
        latent=latent,
        num_kv_heads=shape.num_heads,
        qkv_bias=bias,
        attention_out_bias=bias,
        layers=tuple(replace(layer, attention_scale=scale) for layer in shape.layers),
    )
    return _add_experts(shape, experts, [i >= first for i in range(shape.num_layers)])


def _read_latent_shape(fields: ConfigFields) -> LatentShape:
    latent = LatentShape(
        query_rank=None
        if "q_lora_rank" in fields and fields.read("q_lora_rank") is None
        else fields.read_integer("q_lora_rank", 1536),
        key_value_rank=fields.read_integer("kv_lora_rank", 512),
        nope_dim=fields.read_integer("qk_nope_head_dim", 128),
        rope_dim=fields.read_integer("qk_rope_head_dim", 64),
        value_dim=fields.read_integer("v_head_dim", 128),
        interleaved=fields.read_flag("rope_interleave", True),
    )
    for name, value in (
        ("head_dim", latent.rope_dim),
        ("qk_head_dim", latent.nope_dim + latent.rope_dim),
    ):
        fields.require_value(
            name,
            (value,),
            "transformers computes this from the parts of a head and ignores the field",
        )
    return latent


def _read_deepseek_experts(fields: ConfigFields) -> ExpertShape:
    moe_inner = fields.read_integer("moe_intermediate_size", 2048)
    num_experts = _read_num_experts(fields, "n_routed_experts")
    experts = _read_experts(
        fields,
        count_field="n_routed_experts",
        per_token=8,
        coefficient=None,
        intermediate_size=moe_inner,
        shared_intermediate_size=moe_inner * fields.read_integer("n_shared_experts", 1, minimum=0),
        score="sigmoid",
        normalised=fields.read_flag("norm_topk_prob", True),
        weight_scale=fields.read_number("routed_scaling_factor", 2.5, is_exclusive=True),
        balance_bias=True,
        **_read_groups(fields, num_experts, fields.read_integer("num_experts_per_tok", 8)),
    )
    fixed_values = {
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "ep_size": 1,
    }
    for name, fixed_value in fixed_values.items():
        fields.require_value(
            name, (fixed_value, None), "only this value is supported for this family"
        )
    for name in ("aux_loss_alpha", "seq_aux"):
        fields.read(name)  # in older files; here the recipe decides about the balance loss
    return experts


def _compute_latent_scale(fields: ConfigFields, head_dim: int) -> float:
    """Compute 1 / sqrt(head_dim), times YaRN's squared factor if `mscale_all_dim` is set."""
    rope = fields.read("rope_parameters") or fields.read("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    mscale = rope.get("mscale_all_dim") or 0
    scale = 1.0 / math.sqrt(head_dim)
    if kind == "default" or not mscale:
        return scale
    return scale * compute_yarn_temperature(float(rope["factor"]), float(mscale)) ** 2


def _read_groups(fields: ConfigFields, num_experts: int, experts_per_token: int) -> dict[str, int]:
    """Read the number of expert groups (nodes of the original training) and groups per
    token.
    """
    num_groups = fields.read_integer("n_group", 8)
    per_token = fields.read_integer("topk_group", 4)
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


SPARSE_MODEL_FAMILIES: dict[str, Callable[[ConfigFields], ModelShape]] = {
    "mixtral": _read_mixtral,
    "qwen3_moe": _read_qwen3_moe,
    "olmoe": _read_olmoe,
    "gpt_oss": _read_gpt_oss,
    "deepseek_v3": _read_deepseek_v3,
}
"""Readers by `model_type`."""
