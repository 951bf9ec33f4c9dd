"""Low-rank adapters of a frozen model: which matrices have them, and how large they are."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from shardwright.config.recipe_section import Fraction, PathText, Positive, RecipeSection

AdapterKind = Literal["lora", "rslora", "dora"]

QuantizeKind = Literal["nf4"]

DEFAULT_RANK = 16


class AdapterSection(RecipeSection):
    """Low-rank adapters that are trained while the model's own weights stay frozen.

    A matrix W `[out, in]` becomes W + scale x B A, with A `[rank, in]` and B `[out, rank]`. B
    is initialised to zero, so training starts from the unchanged model.
    """

    kind: AdapterKind | None = None
    """`lora`: scale = alpha / rank (arXiv 2106.09685). `rslora`: alpha / sqrt(rank), which
    keeps the size of updates similar across ranks (arXiv 2312.03732). `dora`: like lora, and
    each output's row of W + scale x B A also gets a learned length (arXiv 2402.09353). Default:
    lora."""
    rank: Positive | None = None
    """Rows of A and columns of B. Default: 16."""
    alpha: Annotated[float, Field(strict=True, gt=0)] | None = None
    """Numerator of the scale. Default: twice the rank."""
    dropout: Fraction = 0.0
    """Fraction of A's inputs that are zeroed in training; adapters of experts use no dropout,
    as in peft."""
    targets: tuple[str, ...] | None = None
    """Matrices that get an adapter, as patterns of module names or of their last components:
    `q_proj`, `self_attn.*`, `model.layers.1?.mlp.*`. Default: every projection of attention and
    feed-forward in the blocks, including experts. A pattern without a match is an error."""
    exclude: tuple[str, ...] = ()
    """Matrices among `targets` that get no adapter, as patterns of the same kind."""
    quantize: QuantizeKind | None = None
    """`nf4` stores the frozen projections of the blocks, including experts, in 4 bits (QLoRA,
    arXiv 2305.14314): blocks of 64 elements with one fp32 scale each, 4.5 bits per element.
    Embeddings, head, norms, biases and routers are not quantised. The quantised base is the
    same under every layout. Default: the base keeps the precision of the other weights."""
    path: PathText | None = None
    """Folder of an adapter to start from, as written by peft or by an export
    (adapter_config.json, adapter_model.safetensors). It determines kind, rank, alpha and
    targets; only `dropout` and `quantize` can be combined with it."""

    @model_validator(mode="after")
    def _check_folder(self) -> AdapterSection:
        if self.path is not None:
            conflicting = [
                name
                for name in ("kind", "rank", "alpha", "targets")
                if getattr(self, name) is not None
            ]
            conflicting += ["exclude"] if self.exclude else []
            if conflicting:
                raise ValueError(
                    f"the adapter in `path` already determines {', '.join(conflicting)}; "
                    "remove these keys or remove `path`"
                )
        return self
