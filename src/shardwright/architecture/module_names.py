"""Names of our decoder's modules in Hugging Face files, per family. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModuleNames:
    """Module names of one family; None if the family has no such module.

    A field has the name of the decoder's attribute; its value is the name in files written by
    `save_pretrained`. A decoder registers its modules, and `ModelShape.list_parameters` lists
    them, in the order of execution: norm before attention, attention, norm after it, norm before
    the feed-forward, feed-forward, norm after it. `expert_files` are the names of one expert's
    gate, up and down projections in weight files; empty if files contain the stacked tensors.
    `fp32_roles` are the roles of parameters that bf16 and fp16 folders store in fp32;
    `fp32_roles_in_fp16` those that fp16 folders do.
    """

    root: str = "model"
    embedding: str = "embed_tokens"
    positions: str | None = None
    layers: str = "layers"
    final_norm: str = "norm"
    head: str = "lm_head"
    attention: str = "self_attn"
    query: str = "q_proj"
    key: str = "k_proj"
    value: str = "v_proj"
    qkv: str | None = None
    attention_out: str = "o_proj"
    query_norm: str = "q_norm"
    key_norm: str = "k_norm"
    sinks: str | None = None
    query_latent: str = "q_a_proj"
    query_latent_norm: str = "q_a_layernorm"
    query_from_latent: str = "q_b_proj"
    key_value_latent: str = "kv_a_proj_with_mqa"
    key_value_latent_norm: str = "kv_a_layernorm"
    key_value: str = "kv_b_proj"
    mlp: str = "mlp"
    gate: str | None = "gate_proj"
    up: str = "up_proj"
    gate_up: str | None = None
    down: str = "down_proj"
    router: str = "gate"
    balance_bias: str = "e_score_correction_bias"
    experts: str = "experts"
    expert_gate_up: str = "gate_up_proj"
    expert_down: str = "down_proj"
    expert_files: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    shared_experts: str = "shared_experts"
    pre_attention_norm: str | None = "input_layernorm"
    post_attention_norm: str | None = None
    pre_mlp_norm: str | None = "post_attention_layernorm"
    post_mlp_norm: str | None = None
    fp32_roles: tuple[str, ...] = ()
    fp32_roles_in_fp16: tuple[str, ...] = ()

    def to_hf_name(self, path: str) -> str:
        """Translate a parameter's path in our decoder to its Hugging Face name.

        The stacked matrix of all experts is a module's weight in our decoder, and one tensor in
        files.

        >>> LLAMA.to_hf_name("layers.0.attention.query.weight")
        'model.layers.0.self_attn.q_proj.weight'
        >>> LLAMA.to_hf_name("layers.0.mlp.experts.down.bias")
        'model.layers.0.mlp.experts.down_proj_bias'
        """
        *modules, leaf = path.split(".")
        if "experts" in modules:
            stack: str = getattr(self, f"expert_{modules.pop()}")
            leaf = stack if leaf == "weight" else f"{stack}_{leaf}"
        else:
            leaf = getattr(self, leaf, leaf)
        root = () if modules[0] == "head" else (self.root,)
        return ".".join((*root, *(getattr(self, module, module) for module in modules), leaf))


LLAMA = ModuleNames()
PHI3 = ModuleNames(qkv="qkv_proj", gate_up="gate_up_proj", gate=None)
GEMMA = ModuleNames(
    post_attention_norm="post_attention_layernorm",
    pre_mlp_norm="pre_feedforward_layernorm",
    post_mlp_norm="post_feedforward_layernorm",
)
OLMO2 = ModuleNames(
    pre_attention_norm=None,
    post_attention_norm="post_attention_layernorm",
    pre_mlp_norm=None,
    post_mlp_norm="post_feedforward_layernorm",
)
GPT2 = ModuleNames(
    root="transformer",
    embedding="wte",
    positions="wpe",
    layers="h",
    final_norm="ln_f",
    attention="attn",
    qkv="c_attn",
    attention_out="c_proj",
    gate=None,
    up="c_fc",
    down="c_proj",
    pre_attention_norm="ln_1",
    pre_mlp_norm="ln_2",
)
GPT_NEOX = ModuleNames(
    root="gpt_neox",
    embedding="embed_in",
    final_norm="final_layer_norm",
    head="embed_out",
    attention="attention",
    qkv="query_key_value",
    attention_out="dense",
    gate=None,
    up="dense_h_to_4h",
    down="dense_4h_to_h",
)
MIXTRAL = ModuleNames(mlp="block_sparse_moe", expert_files=("w1", "w3", "w2"))
GPT_OSS = ModuleNames(router="router", expert_files=(), sinks="sinks", fp32_roles_in_fp16=("norm",))
DEEPSEEK_V3 = ModuleNames(fp32_roles=("router", "balance_bias"))
