"""Recipe sections of the model, the tokenizer and expert load balancing."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from shardwright.config.recipe_section import PathText, Positive, RecipeSection


def _parse_dropout(value: Any) -> Any:
    return "off" if value is False else value  # YAML reads an unquoted `off` as false


AttentionSetting = Literal["auto", "sdpa", "varlen", "flex", "explicit"]
PointwiseSetting = Literal["auto", "compiled", "loss", "none"]
Dropout = Annotated[Literal["config", "off"], BeforeValidator(_parse_dropout)]


class ModelSection(RecipeSection):
    """The decoder and the source of its weights."""

    path: PathText | None = None
    """A Hugging Face folder: its config.json defines the architecture and, with
    `init: pretrained`, its safetensors files the weights."""
    config: dict[str, Any] | None = None
    """The content of a config.json, inline (`model_type: llama`, ...). Without `vocab_size` the
    tokenizer's size is used."""
    init: Literal["random", "pretrained"] | None = None
    """`pretrained` loads the folder's weights; `random` initialises each parameter from its
    name and the seed. Default: `pretrained` with `path`, `random` with `config`."""
    attention: AttentionSetting = "auto"
    """The attention kernel. `auto` takes the best one for the device and what the model needs, and
    logs it with the reason; `sdpa` is PyTorch's scaled dot product, with a dense mask if needed;
    `varlen` flash attention over documents and windows; `flex` FlexAttention, also for soft caps
    and sinks; `explicit` computes attention with separate matrix products. A kernel that is missing
    or cannot compute the model is an error."""
    compile: bool | Literal["auto"] = "auto"
    """Compile each block with torch.compile. `auto` compiles on CUDA devices on which Triton
    works, if model and layout allow it; the choice and its reason are recorded in the run
    folder."""
    compile_functions: bool | Literal["auto"] = "auto"
    """Compile single functions with torch.compile, whatever `compile` does with the blocks: the
    updates of `adamw`, `adamw_8bit` and `adafactor`, and the dequantisation of `nf4`. `auto`
    compiles on CUDA devices on which Triton works. A function whose results differ in a bit from
    the uncompiled one's is not used; the log says so."""
    fused_pointwise: PointwiseSetting = "auto"
    """Norms, gates, rotary embeddings, residual sums and the loss of a chunk of logits in one pass
    over memory each, where blocks are not compiled as a whole: `compiled` compiles each function by
    itself with torch.compile, `loss` that of the loss only, `none` runs separate operations. `auto`
    is `compiled` on CUDA devices on which Triton works, if `compile` is off there, and `loss` for
    transformers' own classes; the log says which and why. Results differ by rounding."""
    loss_chunk_tokens: Positive | Literal["auto"] = "auto"
    """Tokens whose logits the chunked linear cross-entropy computes at a time. `auto` is 1,024,
    and on CUDA up to 8,192 if the predicted memory of the run with them fits into the free
    memory of the fullest device."""
    loss_kernel: Literal["chunked", "liger"] = "chunked"
    """`chunked` computes the head and its loss in chunks of tokens. `liger` takes Liger Kernel's
    fused linear cross-entropy, on CUDA with the package liger-kernel: equal numbers but for
    rounding. Without tensor parallelism, factors of logits, loss weights and preferences."""
    dropout: Dropout = "config"
    """`off` disables the dropout that the model's config.json specifies."""
    trust_remote_code: bool = False
    """Let the Python code in the folder `path` build a model of an unknown family. The code
    runs with your permissions."""
    freeze: tuple[str, ...] = ()
    """Parameters that keep their initial values, by name pattern (`*.bias`). They have no gradients
    and no optimizer states; layers below all trained parameters have no backward pass. A pattern
    without a match is an error."""
    keep_zeros: bool = False
    """Keep zeros in the matrices of `path` at zero, so that a pruned model stays pruned. Their
    gradients are excluded from all sums."""

    @model_validator(mode="after")
    def _check_source(self) -> ModelSection:
        if self.keep_zeros and not self.is_pretrained:
            raise ValueError("`keep_zeros` is for weights from a folder; it needs `path`")
        if (self.path is None) == (self.config is None):
            raise ValueError(
                "give exactly one of `path` (Hugging Face folder) and `config` (inline config.json)"
            )
        if self.loss_kernel != "chunked" and self.loss_chunk_tokens != "auto":
            raise ValueError(
                f"`loss_chunk_tokens` has no effect with `loss_kernel: {self.loss_kernel}`, which "
                "chooses its own chunks; remove it"
            )
        if self.init == "pretrained" and self.path is None:
            raise ValueError("`init: pretrained` needs `path`, the folder with the weights")
        if self.trust_remote_code and self.path is None:
            raise ValueError("`trust_remote_code` needs `path`, the folder with the code")
        return self

    @property
    def smallest_loss_chunk(self) -> int:
        """Tokens of a chunk of the loss; with `auto` the fewest that a run chooses."""
        return 1024 if self.loss_chunk_tokens == "auto" else self.loss_chunk_tokens

    @property
    def has_auto_loss_chunk(self) -> bool:
        """True if a run chooses the tokens of a chunk of the loss by free memory."""
        return self.loss_kernel == "chunked" and self.loss_chunk_tokens == "auto"

    @property
    def is_pretrained(self) -> bool:
        """True if weights are loaded from `path`."""
        return self.init == "pretrained" or (self.init is None and self.path is not None)


class TokenizerSection(RecipeSection):
    """Tokenizer: loaded from a folder, or built from the training sources."""

    kind: Literal["huggingface", "bpe", "character"] = "huggingface"
    """`huggingface`: the tokenizer in `path` (default: the model's folder). `bpe`: byte-level
    BPE trained on the training sources. `character`: one id per character of the training
    sources."""
    path: PathText | None = None
    """Folder with tokenizer.json, for `kind: huggingface`."""
    vocab_size: Annotated[int, Field(gt=0, le=2**22, strict=True)] | None = None
    """Size of the vocabulary to train, for `kind: bpe`; at most 4,194,304."""

    @model_validator(mode="after")
    def _check_kind(self) -> TokenizerSection:
        if self.kind == "bpe" and self.vocab_size is None:
            raise ValueError("`kind: bpe` needs `vocab_size`")
        if self.kind != "bpe" and self.vocab_size is not None:
            raise ValueError(
                f"`vocab_size` applies only to `kind: bpe`; a {self.kind} tokenizer determines its "
                "own size"
            )
        if self.kind != "huggingface" and self.path is not None:
            raise ValueError(
                f"`path` is for `kind: huggingface`; "
                f"a {self.kind} tokenizer is built from training data"
            )
        return self


class MoeSection(RecipeSection):
    """Load balancing over the experts of a mixture-of-experts model; active in training
    only."""

    balance_loss_coefficient: Annotated[float, Field(strict=True, ge=0)] | None = None
    """Weight of the auxiliary balance loss, counted per sequence. Default: router_aux_loss_coef
    of the model's config.json, or 0 for a family without that field."""
    z_loss_coefficient: Annotated[float, Field(strict=True, ge=0)] = 0.0
    """Weight of the router z-loss, which keeps the router's logits small; 0.001 is usual when
    training from scratch."""
    capacity_factor: Annotated[float, Field(strict=True, gt=0)] | None = None
    """Tokens that an expert accepts from one sequence, as a multiple of its even share; the
    others are dropped. Null drops none."""
    bias_update_rate: Annotated[float, Field(strict=True, ge=0)] | None = None
    """Change of each expert's balance bias per step, towards even loads. Default 0.001 for a
    model with such biases."""
