"""Which decoder, which tokenizer, and how experts are kept evenly used."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from shardwright.config.section import PathText, Positive, Section


def _as_dropout(value: Any) -> Any:
    return "off" if value is False else value  # YAML reads a bare `off` as a switch


Dropout = Annotated[Literal["config", "off"], BeforeValidator(_as_dropout)]


class ModelSection(Section):
    """Which decoder, and where its weights come from."""

    path: PathText | None = None
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
    dropout: Dropout = "config"
    """`off` trains without the dropout that the model's config.json asks for."""
    trust_remote_code: bool = False
    """Let a model of an unknown family be made by the Python code in its own folder (`path`), which then runs as you."""
    freeze: tuple[str, ...] = ()
    """Parameters that keep their initial values, by name pattern (`*.bias`). A pattern that matches nothing is an error."""
    keep_zeros: bool = False
    """Zeros of the matrices of `path` stay zero: a pruned model stays pruned. Their gradients count nowhere."""

    @model_validator(mode="after")
    def _one_source(self) -> ModelSection:
        if self.keep_zeros and not self.pretrained:
            raise ValueError("`keep_zeros` keeps those of a folder's weights; it needs `path`")
        if (self.path is None) == (self.config is None):
            raise ValueError("give either `path` (a Hugging Face folder) or `config` (its config.json inline), not both or neither")
        if self.init == "pretrained" and self.path is None:
            raise ValueError("`init: pretrained` needs `path`, the folder that holds the weights")
        if self.trust_remote_code and self.path is None:
            raise ValueError("`trust_remote_code` needs `path`, the folder that holds the code")
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
    path: PathText | None = None
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
