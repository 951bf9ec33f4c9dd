"""`shardwright data`: show the training data as the model will see it. Needs no torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import typer
from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from shardwright.architecture import MODEL_FAMILIES, read_config, read_content
from shardwright.cli.console import open_console
from shardwright.cli.data_progress import show_data_progress
from shardwright.cli.options import JsonOutput, Overrides, RecipePath
from shardwright.config import Recipe, load_recipe
from shardwright.data.data_report import SideReport
from shardwright.data.dataset import TokenDataset
from shardwright.data.model_data import ReadShape, prepare_for_model
from shardwright.data.preparation import PreparedData
from shardwright.data.preview import PreviewSpan, read_spans
from shardwright.data.record_formats import RECORD_KINDS
from shardwright.data.sample_order import SampleOrder
from shardwright.errors import RecipeError
from shardwright.plan import count_steps, resolve_batch, resolve_degrees

SCHEMA_VERSION = 1
MAX_BROKEN_SHOWN = 8
_SUPERVISION_TEXTS = {
    "assistant": "assistant turns and responses",
    "last": "last assistant turn",
    "all": "all tokens",
}
MAX_TOKENS_SHOWN = 400
_TOKEN_STYLES = ("green", "cyan")
SampleSide = Literal["train", "validation"]


@dataclass(frozen=True)
class TrainingLength:
    """Length of the training: optimizer steps, and passes over the training samples."""

    global_batch_size: int
    data_ranks: int
    num_steps: int
    num_epochs: float


@dataclass(frozen=True)
class DecodedSample:
    """A decoded sample; `position` is in the run's sample order (for validation, in the
    dataset)."""

    side: SampleSide
    position: int
    index: int
    num_tokens: int
    num_supervised: int
    num_padding: int
    spans: list[PreviewSpan]


def data_command(
    recipe: RecipePath,
    overrides: Overrides = None,
    samples: Annotated[
        int, typer.Option("--samples", min=0, help="Number of decoded samples to show.")
    ] = 2,
    position: Annotated[
        int,
        typer.Option(
            "--position", min=0, help="First position to show, in the run's sample order."
        ),
    ] = 0,
    validation: Annotated[
        bool, typer.Option("--validation", help="Show validation samples.")
    ] = False,
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", min=1, help="Ranks of the run, to compute its batch size."),
    ] = None,
    json_output: JsonOutput = False,
) -> None:
    """Show the data as the model will see it: counts, lengths, broken records, decoded samples.

    Supervised tokens of the samples are coloured.
    """
    loaded_recipe = load_recipe(recipe, list(overrides or []))
    with show_data_progress() as on_progress:
        _, prepared = prepare_for_model(
            loaded_recipe, _choose_shape_reader(loaded_recipe), progress=on_progress
        )
    length = compute_training_length(loaded_recipe, len(prepared.train), nproc)
    decoded = decode_samples(
        loaded_recipe, prepared, "validation" if validation else "train", position, samples
    )
    if json_output:
        sys.stdout.write(
            json.dumps(build_json(loaded_recipe, prepared, length, decoded), ensure_ascii=False)
            + "\n"
        )
    else:
        open_console(highlight=False).print(render_report(loaded_recipe, prepared, length, decoded))


def _choose_shape_reader(recipe: Recipe) -> ReadShape:
    """Return the reader of the model's shape.

    Torch is imported only for families that our decoder does not support.
    """
    config = recipe.model.config if recipe.model.config is not None else recipe.model.path
    assert config is not None  # one of them is required by the schema
    if read_content(config).get("model_type") in MODEL_FAMILIES:
        return read_config
    from shardwright.model.hf_model import read_model_shape

    return partial(read_model_shape, section=recipe.model)


def compute_training_length(
    recipe: Recipe, num_samples: int, num_ranks: int | None
) -> TrainingLength:
    """Compute steps and epochs of the run on `num_ranks`.

    None uses the data ranks of the recipe's layout, or one.
    """
    if num_ranks is not None:
        _, batch = resolve_degrees(recipe, num_ranks)
    else:
        batch = resolve_batch(
            recipe.training, (recipe.layout.dp_replicate or 1) * (recipe.layout.dp_shard or 1)
        )
    batch_size = batch.global_batch_size
    num_steps = count_steps(recipe.training, num_samples, batch_size)
    return TrainingLength(
        batch_size, batch.data_ranks, num_steps, num_steps * batch_size / num_samples
    )


def decode_samples(
    recipe: Recipe, prepared: PreparedData, side: SampleSide, position: int, num_samples: int
) -> list[DecodedSample]:
    """Decode the samples that the run reads from `position` on."""
    dataset: TokenDataset | None = prepared.train if side == "train" else prepared.validation
    if dataset is None:
        raise RecipeError(
            "there is no validation data",
            field="data.validation_fraction",
            got=0,
            remedy="Set a fraction, or data.validation",
        )
    order = SampleOrder(recipe.seed, len(dataset))
    decoded = []
    for current in range(position, position + num_samples):
        if side == "validation" and current >= len(dataset):
            break
        index, epoch = (
            (order.get_index(current), order.get_epoch(current))
            if side == "train"
            else (current, 0)
        )
        sample = dataset.get_sample(index, epoch)
        spans = read_spans(sample, prepared.tokenizer)
        num_free = sample.num_padding
        supervised = sum(span.num_tokens for span in spans if span.is_supervised)
        decoded.append(
            DecodedSample(
                side, current, index, len(sample.labels) - num_free, supervised, num_free, spans
            )
        )
    return decoded


def build_json(
    recipe: Recipe, prepared: PreparedData, length: TrainingLength, samples: list[DecodedSample]
) -> dict[str, Any]:
    """Return everything that the terminal shows.

    Consecutive tokens with the same supervision are joined into one span.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "recipe": recipe.name,
        "sequence_length": recipe.training.sequence_length,
        "content_hash": prepared.content_hash,
        **prepared.report.as_dict(),
        "run": {
            "global_batch_size": length.global_batch_size,
            "data_ranks": length.data_ranks,
            "num_steps": length.num_steps,
            "num_epochs": length.num_epochs,
            "num_tokens": length.num_steps
            * length.global_batch_size
            * recipe.training.sequence_length,
        },
        "samples": [
            {
                "side": sample.side,
                "position": sample.position,
                "index": sample.index,
                "num_tokens": sample.num_tokens,
                "num_supervised": sample.num_supervised,
                "num_free_positions": sample.num_padding,
                "spans": [
                    {
                        "text": span.text,
                        "num_tokens": span.num_tokens,
                        "supervised": span.is_supervised,
                        "document": span.document,
                    }
                    for span in _join_spans(sample.spans)
                ],
            }
            for sample in samples
        ],
    }


def _join_spans(spans: list[PreviewSpan]) -> Iterator[PreviewSpan]:
    pending: PreviewSpan | None = None
    for span in spans:
        if pending is not None and (pending.is_supervised, pending.document) == (
            span.is_supervised,
            span.document,
        ):
            pending = PreviewSpan(
                pending.text + span.text,
                pending.num_tokens + span.num_tokens,
                pending.is_supervised,
                pending.document,
            )
        else:
            if pending is not None:
                yield pending
            pending = span
    if pending is not None:
        yield pending


def render_report(
    recipe: Recipe, prepared: PreparedData, length: TrainingLength, samples: list[DecodedSample]
) -> RenderableType:
    """Render the complete report for a terminal."""
    parts: list[RenderableType] = [
        _render_sources(recipe, prepared),
        _render_formats(prepared),
        Text(),
        _render_sides(recipe, prepared),
    ]
    parts += [_render_training_length(recipe, length, prepared.report.packing), Text()]
    if prepared.report.train.counts.num_documents > 1:
        parts.append(_render_histogram(prepared.report.train, recipe.training.sequence_length))
    if prepared.report.records.num_broken:
        parts += [Text(), _render_broken(prepared)]
    parts += [
        panel
        for sample in samples
        for panel in (Text(), _render_sample(sample, recipe.training.sequence_length))
    ]
    if samples:
        parts.append(
            Text.assemble(
                "  ",
                ("super", "green"),
                ("vised", "cyan"),
                " tokens alternate in colour; ",
                ("dim", "dim"),
                " tokens are not supervised",
            )
        )
    return Group(*parts)


def _render_sources(recipe: Recipe, prepared: PreparedData) -> Text:
    report = prepared.report
    records = report.records
    facts = [_format_count(report.num_files, "file"), _format_count(records.num_records, "record")]
    if records.num_empty_files:
        facts.append(f"{_format_count(records.num_empty_files, 'empty file')} skipped")
    if report.num_duplicates_dropped:
        facts.append(
            f"{_format_count(report.num_duplicates_dropped, 'held-out duplicate')} dropped"
        )
    text = Text.assemble((recipe.name, "bold"), "  ", " · ".join(facts))
    if records.num_broken:
        text.append(
            f" · {records.num_broken:,} broken ({records.broken_fraction:.2%})", style="yellow"
        )
    requested = recipe.tokenizer.vocab_size
    fewer = (
        f" ({requested:,} requested, but no further pair occurs twice)"
        if requested and report.vocab_size < requested
        else ""
    )
    if report.tokenizer_kind == "none":
        tokenizer = f"no tokenizer: samples are token ids, vocabulary of {report.vocab_size:,}"
    else:
        tokenizer = f"tokenizer {report.tokenizer_kind}, {report.vocab_size:,} ids{fewer}"
    text.append(f"\n{tokenizer} · {_describe_packing(recipe, report.packing)}")
    if report.supervise is not None:
        template = (
            f" · chat template: {report.template}" if report.template else " · no chat template"
        )
        text.append(f"\nsupervised: {_SUPERVISION_TEXTS[report.supervise]}{template}")
    text.append("\n")
    return text


def _describe_packing(recipe: Recipe, packing: str) -> str:
    length = recipe.training.sequence_length
    size = (
        f"at most {length:,} tokens" if recipe.data.padding == "longest" else f"{length:,} tokens"
    )
    return {
        "windows": f"windows of {length:,} tokens, with new boundaries in every epoch",
        "documents": f"documents packed into rows of {length:,} tokens, each attending to itself",
        "none": f"one row of {size} per document, not packed",
        "pairs": f"one row of {size} per pair: chosen response, then rejected response",
    }[packing]


def _render_formats(prepared: PreparedData) -> Table:
    """List the sources with the detected kind and columns of their records."""
    sources = prepared.report.sources
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="bold")
    table.add_column("source", overflow="fold")
    table.add_column("records")
    table.add_column("documents", justify="right")
    if any(source.weight is not None for source in sources):
        table.add_column("weight", justify="right")
        table.add_column("share of epoch", justify="right")
    for source in sources:
        kinds = ", ".join(RECORD_KINDS[kind].summary for kind in source.records.split(", ") if kind)
        named = [name if name == role else f"{role}: {name}" for role, name in source.columns]
        columns = ", ".join(named) if len(named) > 1 or ": " in "".join(named) else ""
        columns = f" ({columns})" if columns else ""
        cells: list[RenderableType] = [
            Text(source.path),
            Text.assemble(kinds, (columns, "dim")),
            f"{source.num_documents:,}",
        ]
        if source.weight is not None and source.share is not None:
            cells += [f"{source.weight:g}", f"{source.share:.1%}"]
        table.add_row(*cells)
    return table


def _format_count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _render_sides(recipe: Recipe, prepared: PreparedData) -> Table:
    sides = {"train": prepared.report.train}
    if prepared.report.validation is not None:
        sides["validation"] = prepared.report.validation
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="bold")
    table.add_column("")
    for name in sides:
        table.add_column(name, justify="right")
    length = recipe.training.sequence_length

    def row(label: str, *values: str | Text) -> None:
        table.add_row(Text(label, style="dim"), *values)

    reports = list(sides.values())
    row("documents", *(f"{side.counts.num_documents:,}" for side in reports))
    row("characters", *(f"{side.counts.num_characters:,}" for side in reports))
    row("tokens", *(f"{side.counts.num_tokens:,}" for side in reports))
    row(
        "characters per token",
        *(f"{side.counts.num_characters / max(1, side.counts.num_tokens):.2f}" for side in reports),
    )
    row("samples", *(f"{side.num_samples:,}" for side in reports))
    row(
        "supervised",
        *(f"{side.num_supervised / (side.num_samples * length):.2%}" for side in reports),
    )
    if prepared.report.packing != "windows":
        row(
            "padding to full rows" if recipe.data.padding == "longest" else "padding",
            *(f"{side.padding_fraction:.2%}" for side in reports),
        )
    for label, counts in (
        ("longer than a sample: split", [side.num_cut for side in reports]),
        ("longer than a sample: dropped", [side.num_dropped for side in reports]),
        ("pieces without supervised tokens", [side.num_unsupervised_pieces for side in reports]),
    ):
        if any(counts):
            row(label, *(Text(f"{count:,}", "yellow") if count else "0" for count in counts))
    if any(side.counts.num_weighted for side in reports):
        row(
            "tokens with a loss weight other than 1",
            *(f"{side.counts.num_weighted:,}" for side in reports),
        )
    if any(side.counts.num_unknown for side in reports):
        row("unknown tokens", *(Text(f"{side.counts.num_unknown:,}", "yellow") for side in reports))
    return table


def _render_training_length(recipe: Recipe, length: TrainingLength, packing: str) -> Text:
    at_most = "at most " if packing != "windows" and recipe.data.padding == "longest" else ""
    tokens = length.global_batch_size * recipe.training.sequence_length
    ranks = (
        ""
        if recipe.training.global_batch_size
        else f" on {_format_count(length.data_ranks, 'data rank')}"
    )
    text = Text.assemble(
        "\nthe run reads ",
        (f"{length.num_epochs:.3g} epochs", "bold"),
        f": {_format_count(length.num_steps, 'step')} of {length.global_batch_size:,} x "
        f"{recipe.training.sequence_length:,}"
        f" = {at_most}{tokens:,} tokens{ranks}",
    )
    if not length.num_steps:
        text.append("; the data does not fill one global batch", style="red")
    return text


def _render_histogram(side: SideReport, sequence_length: int) -> Table:
    """Show documents by length in tokens, compared with the sequence length."""
    table = Table(
        box=None,
        padding=(0, 2, 0, 0),
        title="training documents by length",
        title_justify="left",
        title_style="bold",
    )
    table.add_column("tokens", justify="right", style="dim")
    table.add_column("", justify="right")
    table.add_column("", width=40)
    largest = max((count for _, count in side.length_histogram), default=0)
    first = next((number for number, (_, count) in enumerate(side.length_histogram) if count), 0)
    for upper, count in side.length_histogram[first:]:
        fits = upper <= sequence_length
        bar = Bar(largest, 0, count, width=40, color="green" if fits else "blue")
        table.add_row(f"<= {upper:,}", f"{count:,}", bar)
    if any(count and upper > sequence_length for upper, count in side.length_histogram):
        table.caption = f"blue: possibly longer than a sample of {sequence_length:,}"
        table.caption_justify = "left"
        table.caption_style = "dim"
    return table


def _render_broken(prepared: PreparedData) -> Text:
    records = prepared.report.records
    text = Text.assemble(
        (f"skipped: {_format_count(records.num_broken, 'broken record')}", "yellow bold")
    )
    for item in records.broken[:MAX_BROKEN_SHOWN]:
        text.append(f"\n  {item.file}:{item.line} ").append(item.reason, style="dim")
    if records.num_broken > MAX_BROKEN_SHOWN:
        text.append(f"\n  and {records.num_broken - MAX_BROKEN_SHOWN:,} more", style="dim")
    return text


def _render_sample(sample: DecodedSample, sequence_length: int) -> Panel:
    several_characters = sum(len(span.text) for span in sample.spans) > 1.5 * len(sample.spans)
    text = Text()
    for number, span in enumerate(sample.spans[:MAX_TOKENS_SHOWN]):
        if number and span.document != sample.spans[number - 1].document:
            text.append("\n" + "─" * 24 + "\n", style="dim")
        # Colours alternate to show token boundaries; with one token per character they would
        # flicker.
        style = (
            _TOKEN_STYLES[number % 2 if several_characters else 0] if span.is_supervised else "dim"
        )
        text.append(_escape_control_characters(span.text), style=style)
    if len(sample.spans) > MAX_TOKENS_SHOWN:
        text.append(
            f"\n... {len(sample.spans) - MAX_TOKENS_SHOWN:,} more tokens", style="dim italic"
        )
    num_documents = len({span.document for span in sample.spans})
    facts = [f"{sample.side} position {sample.position:,}", f"sample {sample.index:,}"]
    facts += [_format_count(num_documents, "document")] if num_documents > 1 else []
    facts.append(f"{sample.num_supervised:,} of {sequence_length:,} supervised")
    facts += (
        [f"{_format_count(sample.num_padding, 'position')} of padding"]
        if sample.num_padding
        else []
    )
    return Panel(
        text,
        title=Text(" · ".join(facts), style="bold"),
        title_align="left",
        border_style="dim",
        padding=(0, 1),
    )


def _escape_control_characters(text: str) -> str:
    """Mark line ends and tabs, and escape other control characters, which could affect the
    terminal."""
    marks = {"\n": "↵\n", "\t": "→   ", "\x7f": "␡"}
    return "".join(marks.get(character) or _escape_character(character) for character in text)


def _escape_character(character: str) -> str:
    if character < " ":
        return chr(0x2400 + ord(character))
    return character if character.isprintable() or character == " " else f"<U+{ord(character):04X}>"
