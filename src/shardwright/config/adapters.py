"""Low-rank adapters beside a frozen model: which matrices have them, and how large they are."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from shardwright.config.section import Fraction, PathText, Positive, Section

AdapterKind = Literal["lora", "rslora", "dora"]

QuantizeKind = Literal["nf4"]

DEFAULT_RANK = 16


class AdapterSection(Section):
    """Train low-rank adapters beside the model's weights, which stay as they are.

    A matrix W `[out, in]` becomes W + scale x B A, with A `[rank, in]` and B `[out, rank]`. B begins at zero, so the start is the
    model itself.
    """

    kind: AdapterKind | None = None
    """`lora`: scale = alpha / rank (arXiv 2106.09685). `rslora`: alpha / sqrt(rank), which keeps steps alike over ranks (arXiv
    2312.03732). `dora`: as lora, and each output's row of W + scale x B A is given a learned length (arXiv 2402.09353).
    Default: lora."""
    rank: Positive | None = None
    """Rows of A and columns of B. Default: 16."""
    alpha: Annotated[float, Field(gt=0)] | None = None
    """What scale is made of. Default: twice the rank."""
    dropout: Fraction = 0.0
    """Share of A's inputs that are zeroed in training; adapters beside experts take none, as in peft."""
    targets: tuple[str, ...] | None = None
    """Matrices that get an adapter, by patterns over module names or their last parts: `q_proj`, `self_attn.*`,
    `model.layers.1?.mlp.*`. Default: every projection of attention and feed-forward in the blocks, experts included. A pattern that
    matches no such matrix is an error."""
    exclude: tuple[str, ...] = ()
    """Matrices among `targets` that get none, by the same kind of patterns."""
    quantize: QuantizeKind | None = None
    """`nf4` holds the frozen projections of the blocks, experts included, in 4 bits (QLoRA, arXiv 2305.14314): blocks of 64
    elements with an fp32 scale each, 4.5 bits per element. Embeddings, head, norms, biases and routers stay as they are. The same
    base under every layout. Default: the base in the precision of all else."""
    path: PathText | None = None
    """A folder that peft or an export wrote (adapter_config.json, adapter_model.safetensors) to begin with. It says kind, rank,
    alpha and targets; only `dropout` and `quantize` may stand beside it."""

    @model_validator(mode="after")
    def _folder_says_it_all(self) -> AdapterSection:
        if self.path is not None:
            given = [name for name in ("kind", "rank", "alpha", "targets") if getattr(self, name) is not None]
            given += ["exclude"] if self.exclude else []
            if given:
                raise ValueError(f"`path` names a folder that says {', '.join(given)} itself; leave it out, or leave `path` out")
        return self
