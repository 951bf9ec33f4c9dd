"""What the model learns from."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from shardwright.config.section import Fraction, PathText, Positive, Section

RecordsKind = Literal[
    "auto", "text", "messages", "sharegpt", "alpaca", "prompt_response", "prompt_completion", "preference", "tokens"
]  # fmt: skip


class Source(Section):
    """One place that text comes from."""

    path: PathText
    """A file, a folder (read recursively, in name order), a folder that Hugging Face `datasets` saved, or an fsspec URL
    (`s3://...`), which is fetched once into the cache. `${NAME}` is taken from the environment."""
    format: Literal["auto", "text", "jsonl", "json", "parquet", "arrow"] = "auto"
    """`auto` goes by file name: .jsonl/.ndjson, .json, .parquet, .arrow, anything else is text (one file, one document)."""
    records: RecordsKind = "auto"
    """What the records of jsonl, json, parquet and arrow hold; `auto` looks at their columns and shows what it found.
    `prompt_response` is answered through the chat template, where there is one; `prompt_completion` is joined as it stands."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Columns by what they hold where they have other than the usual names, e.g. `{prompt: question, response: solution}`."""
    text_field: str = "text"
    """Field or column that holds the text, for records that are plain text."""
    weight: Annotated[float, Field(gt=0)] | None = None
    """Share of the training samples that come from this source, relative to the others' weights; all sources have one or
    none has. Without weights every sample is seen once in an epoch."""
    glob: str | None = None
    """Which files of a folder, e.g. `*.py`; default all of the formats known."""
    exclude: tuple[str, ...] = ()
    """Files and folders to leave out, as patterns against the path below `path` or any part of it, e.g. `test*`."""


def _as_sources(value: Any) -> Any:
    if isinstance(value, str | dict):
        value = [value]
    if isinstance(value, list | tuple):
        return tuple({"path": item} if isinstance(item, str) else item for item in value)
    return value


Sources = Annotated[tuple[Source, ...], BeforeValidator(_as_sources)]


class DataSection(Section):
    """What the model learns from."""

    sources: Sources = Field(min_length=1)
    """Training text: a path, a mapping, or a list of them."""
    validation: Sources = ()
    """Text to validate on. Without it `validation_fraction` of the training sources is held out."""
    validation_fraction: Fraction = 0.0
    """Share held out for validation."""
    validation_split: Literal["documents", "tail"] = "documents"
    """`documents`: whole documents, chosen by a hash of their content (a duplicate never sits on both sides);
    `tail`: the last characters of the corpus."""
    packing: Literal["auto", "windows", "documents", "none"] = "auto"
    """`windows`: the corpus is one stream, cut into windows. `documents`: documents are laid side by side, and attention
    and positions respect their boundaries. `none`: a row for each document. `auto`: windows for plain text, else documents."""
    padding: Literal["longest", "max_length"] = "longest"
    """How far rows that are not full are filled up: to the `longest` of their micro-batch (with `packing: none` the rows of a
    step are dealt to micro-batches by length), or to sequence_length. What fills them is never seen and never learnt, so that
    loss and gradients are the same. Rows of compiled blocks, and of experts with balance losses or a capacity, keep one length."""
    pad_to_multiple_of: Positive = 8
    """`padding: longest` rounds lengths up to a multiple of this, and of what the layout cuts rows into."""
    overlong: Literal["cut", "drop", "refuse"] = "cut"
    """A document longer than sequence_length is cut into rows that do not see each other, or left out, or an error; the
    first two are counted. For `packing: documents` and `none`."""
    max_record_characters: Positive | None = 1_000_000
    """A conversation, pair or completion of more characters is set aside as broken, since one such slip would make up most of a
    run; null takes any. Plain text may be of any length."""
    supervise: Literal["assistant", "last", "all"] = "assistant"
    """What is learnt of a conversation: the assistant's turns (of a pair, the response), its last turn, or every token.
    A turn's own `loss_weight` decides before that. Plain text is always learnt whole."""
    chat_template: PathText | None = None
    """File with a Jinja chat template, instead of the tokenizer's own."""
    template_variables: dict[str, Any] = Field(default_factory=dict)
    """Passed to the chat template, e.g. `{enable_thinking: false, date_string: 26 Jul 2024}`."""
    num_workers: Positive | None = None
    """Processes that render and tokenise large sets of conversations; default one per core, at most 16."""
    max_broken_fraction: Fraction = 0.01
    """Records that cannot be read are counted with file and line and set aside; above this share it is an error."""
    cache_dir: PathText | None = None
    """Where tokenised data is kept; default `~/.cache/shardwright/data`, or `$SHARDWRIGHT_CACHE/data`."""

    @model_validator(mode="after")
    def _one_validation(self) -> DataSection:
        if self.validation and self.validation_fraction:
            raise ValueError("give either `validation` (its own sources) or `validation_fraction` (a share of `sources`), not both")
        weighted = sum(source.weight is not None for source in self.sources)
        if 0 < weighted < len(self.sources):
            raise ValueError("give every one of `sources` a `weight`, or none")
        if any(source.weight is not None for source in self.validation):
            raise ValueError("`weight` mixes training sources; validation reads all of its own")
        if self.overlong != "cut" and self.packing == "windows":
            raise ValueError(f"`overlong: {self.overlong}` is for `packing: documents` or `none`; windows cut everywhere")
        return self
