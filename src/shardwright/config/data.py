"""Recipe sections of the training and validation data."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from shardwright.config.recipe_section import (
    Fraction,
    LocalFolderText,
    NonNegative,
    PathText,
    Positive,
    PositiveBytes,
    RecipeSection,
)

RecordsKind = Literal[
    "auto", "text", "messages", "sharegpt", "alpaca", "prompt_response", "prompt_completion",
    "preference", "tokens",
]  # fmt: skip

IGNORED_LABEL = -100
"""Label of unsupervised tokens, in data files too; the one that
`torch.nn.functional.cross_entropy` ignores."""


class DataSource(RecipeSection):
    """One source of text."""

    path: PathText
    """A file, a folder (read recursively, in name order), a folder saved by Hugging Face
    `datasets`, or an fsspec URL (`s3://...`), which is downloaded once into the cache.
    `${NAME}` is replaced by the environment variable."""
    format: Literal[
        "auto", "text", "jsonl", "json", "parquet", "arrow", "mds", "webdataset", "tokens"
    ] = "auto"
    """`auto` decides by file name: .jsonl/.ndjson, .json, .parquet, .arrow; any other file is
    text (one document per file). `mds`: shards of MosaicML Streaming (.mds, .mds.zstd), with
    the package mosaicml-streaming. `webdataset`: tar files with .json or .txt members, with the
    package webdataset. `tokens`: files of token ids (.swtokens) that `shardwright data
    --write-tokens` has written."""
    records: RecordsKind = "auto"
    """Kind of records in jsonl, json, parquet and arrow files; `auto` detects it from their
    columns and reports the result. `prompt_response` is rendered with the chat template if
    there is one; `prompt_completion` is concatenated as it is."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Columns by their content, for columns with other than the usual names, e.g.
    `{prompt: question, response: solution}`."""
    text_field: str = "text"
    """Field or column that holds the text, for records that are plain text."""
    weight: Annotated[float, Field(strict=True, gt=0)] | None = None
    """Share of the training samples drawn from this source, relative to the other weights. Give
    a weight to all sources or to none. Without weights every sample is seen once per epoch."""
    glob: str | None = None
    """Pattern of the files to read in a folder, e.g. `*.py`; default all files of known
    formats."""
    exclude: tuple[str, ...] = ()
    """Patterns of files and folders to skip, matched against the path relative to `path` or
    against any component of it, e.g. `test*`."""


def _parse_sources(value: Any) -> Any:
    if isinstance(value, str | dict):
        value = [value]
    if isinstance(value, list | tuple):
        return tuple({"path": item} if isinstance(item, str) else item for item in value)
    return value


def _parse_optional_sources(value: Any) -> Any:
    return () if value is None else _parse_sources(value)


DataSources = Annotated[tuple[DataSource, ...], BeforeValidator(_parse_sources)]
OptionalDataSources = Annotated[tuple[DataSource, ...], BeforeValidator(_parse_optional_sources)]
"""Sources, or null for none, as other keys without a value have it."""


class WeightKnot(RecipeSection):
    """Weights of all sources from one step on."""

    step: NonNegative
    """First step with these weights, counted from 0."""
    weights: tuple[Annotated[float, Field(strict=True, ge=0)], ...] = Field(min_length=1)
    """One weight per source, in the order of `sources`; 0 leaves a source out."""


class StreamingSection(RecipeSection):
    """Streaming of the training sources: their files are read when they are needed, not all
    before the start."""

    cache_bytes: PositiveBytes = 64 * 1024**3
    """Limit of the tokenised files, and of those being fetched, in the folder `streamed` of the
    cache. Runs that share the folder share them. It must fit `window_files` tokenised files and
    one being fetched; with twice as many, the next ones are read ahead."""
    window_files: Positive = 4
    """Files whose samples are shuffled together. Every epoch has another order of the files, and
    another order of the samples of each window."""


class DataSection(RecipeSection):
    """Training and validation data, and its conversion to rows of tokens."""

    sources: DataSources = Field(min_length=1)
    """Training data: a path, a mapping, or a list of them."""
    weight_schedule: tuple[WeightKnot, ...] = ()
    """Weights of the sources that change during training (a curriculum): from each `step` on
    the sources have these weights instead of their `weight`. A resumed run must have the same
    schedule."""
    weight_transition: Literal["constant", "linear"] = "constant"
    """Shares of the sources between two steps of `weight_schedule`: those of the earlier one, or
    linear between both."""
    streaming: StreamingSection | None = None
    """Set it for sources that are larger than the disk. Each file of the sources is fetched,
    tokenised and removed again, in a bounded cache. Needs a tokenizer (`tokenizer.path`) or
    token ids, and separate validation sources."""
    validation: OptionalDataSources = ()
    """Validation data; null or an empty list for none. Without it, `validation_fraction` of the
    training samples is held out."""
    validation_fraction: Fraction = 0.0
    """Fraction of the training samples held out for validation."""
    validation_split: Literal["documents", "tail"] = "documents"
    """`documents`: whole documents, selected by a hash of their content, so that duplicates are
    always in the same set; `tail`: the last characters of the corpus."""
    packing: Literal["auto", "windows", "documents", "none"] = "auto"
    """`windows`: the corpus is one stream, split into windows. `documents`: several documents
    share a row; attention and positions respect their boundaries. `none`: one document per row.
    `auto`: windows for plain text, documents for other records."""
    padding: Literal["longest", "max_length"] = "longest"
    """Length to which rows that are not full are padded: the `longest` row of their micro-batch
    (with `packing: none`, the rows of a step are grouped into micro-batches by length), or
    sequence_length. Padding is masked in attention and loss, so loss and gradients are the
    same. Experts with balance losses or a capacity, and 8-bit scales of a whole micro-batch,
    always use one length."""
    pad_to_multiple_of: Positive = 8
    """`padding: longest` rounds lengths up to a multiple of this and of the number of parts
    into which the layout shards a row. Compiled blocks have one graph for all lengths."""
    assignment: Literal["length", "work"] = "length"
    """Assignment of the rows of a step to micro-batches and data ranks. `length`: sorted by
    length where padding differs, otherwise in their order. `work`: by their FLOPs, attention
    included, so that data ranks that only wait for each other at the end of a step have equal
    work. The global batch and its gradient are the same. For `packing: documents` and `none`."""
    overlong: Literal["cut", "drop", "refuse"] = "cut"
    """Documents longer than sequence_length: `cut` splits them into rows that do not attend to
    each other, `drop` skips them, `refuse` is an error. Split and skipped documents are
    counted. For `packing: documents` and `none`."""
    max_record_characters: Positive | None = 1_000_000
    """A conversation, pair or completion with more characters counts as broken, because one
    malformed record could otherwise make up most of a run; null allows any length. Plain text
    may have any length."""
    supervise: Literal["assistant", "last", "all"] = "assistant"
    """Tokens that contribute to the loss: the assistant's turns (for a pair, the response), the
    last assistant turn, or all tokens. A turn's own `loss_weight` takes precedence. All tokens
    of plain text contribute."""
    chat_template: PathText | None = None
    """File with a Jinja chat template that replaces the tokenizer's own."""
    template_variables: dict[str, Any] = Field(default_factory=dict)
    """Variables passed to the chat template, e.g.
    `{enable_thinking: false, date_string: 26 Jul 2024}`."""
    num_workers: Positive | None = None
    """Processes that render and tokenise large sets of conversations; default one per core, at
    most 16."""
    max_broken_fraction: Fraction = 0.01
    """Records that cannot be read are skipped and reported with file and line; a larger
    fraction than this is an error."""
    cache_dir: LocalFolderText | None = None
    """Folder for tokenised data; default `~/.cache/shardwright/data`, or
    `$SHARDWRIGHT_CACHE/data`."""

    @model_validator(mode="after")
    def _check_sources(self) -> DataSection:
        if self.validation and self.validation_fraction:
            raise ValueError(
                "`validation` (separate sources) and "
                "`validation_fraction` (a part of `sources`) exclude each other; remove one"
            )
        if self.streaming is not None and self.validation_fraction:
            raise ValueError(
                "`validation_fraction` requires reading all data before the start, which "
                "`streaming` does not do; set `validation` (separate sources)"
            )
        num_weighted = sum(source.weight is not None for source in self.sources)
        if 0 < num_weighted < len(self.sources):
            raise ValueError(
                "some of `sources` have a `weight` and some have none; give it to all or to none"
            )
        self._check_schedule(num_weighted)
        if any(source.weight is not None for source in self.validation):
            raise ValueError(
                "`weight` is for training sources; validation reads all of its sources"
            )
        if self.assignment != "length" and self.packing == "windows":
            raise ValueError(
                f"`assignment: {self.assignment}` is for `packing: documents` or `none`; "
                "all windows need the same amount of work"
            )
        if self.overlong != "cut" and self.packing == "windows":
            raise ValueError(
                f"`overlong: {self.overlong}` is for `packing: documents` or `none`; "
                "windows ignore document boundaries"
            )
        return self

    def _check_schedule(self, num_weighted: int) -> None:
        if not self.weight_schedule:
            if self.weight_transition != "constant":
                raise ValueError("`weight_transition` needs a `weight_schedule`")
            return
        if not num_weighted:
            raise ValueError(
                "`weight_schedule` changes the weights of the sources, but `sources` have none; "
                "give each a `weight`"
            )
        previous = -1
        for knot in self.weight_schedule:
            if len(knot.weights) != len(self.sources):
                raise ValueError(
                    f"`weight_schedule` has {len(knot.weights)} weights at step {knot.step}, but "
                    f"there are {len(self.sources)} sources"
                )
            if not any(knot.weights):
                raise ValueError(f"all weights of `weight_schedule` at step {knot.step} are 0")
            if knot.step <= previous:
                raise ValueError(
                    "the steps of `weight_schedule` must increase, but "
                    f"{knot.step} follows {previous}"
                )
            previous = knot.step
