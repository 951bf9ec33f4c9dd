"""`shardwright data`: what the model will see, before any rank starts. Needs no torch."""

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

from shardwright.architecture import FAMILIES, read_config, read_content
from shardwright.cli.console import open_console
from shardwright.cli.options import JsonOutput, Overrides, RecipePath
from shardwright.cli.progress import data_progress
from shardwright.config import Recipe, load_recipe
from shardwright.data.dataset import TokenDataset
from shardwright.data.fit import ReadShape, prepare_for_model
from shardwright.data.formats import KINDS
from shardwright.data.order import SampleOrder
from shardwright.data.prepare import Prepared
from shardwright.data.preview import Span, read_spans
from shardwright.data.report import SideReport
from shardwright.errors import RecipeError
from shardwright.plan import count_steps, resolve_batch, resolve_degrees

SCHEMA_VERSION = 1
NUM_BROKEN_SHOWN = 8
_SUPERVISED = {"assistant": "the assistant's turns and responses", "last": "the assistant's last turn", "all": "every token"}
NUM_TOKENS_SHOWN = 400
_TOKEN_STYLES = ("green", "cyan")
Side = Literal["train", "validation"]


@dataclass(frozen=True)
class RunLength:
    """How far the run reads: optimizer steps, and passes over the training samples."""

    global_batch_size: int
    data_ranks: int
    num_steps: int
    num_epochs: float


@dataclass(frozen=True)
class ShownSample:
    """A decoded sample: `position` in the order of the run (for validation, in the dataset)."""

    side: Side
    position: int
    index: int
    num_tokens: int
    num_supervised: int
    num_free: int
    spans: list[Span]


def data_command(
    recipe: RecipePath,
    overrides: Overrides = None,
    samples: Annotated[int, typer.Option("--samples", min=0, help="Decoded samples to show.")] = 2,
    position: Annotated[int, typer.Option("--position", min=0, help="Show samples from this position of the run's order on.")] = 0,
    validation: Annotated[bool, typer.Option("--validation", help="Show samples of the validation side.")] = False,
    nproc: Annotated[int | None, typer.Option("--nproc", min=1, help="Ranks of the run, for its batch arithmetic.")] = None,
    json_output: JsonOutput = False,
) -> None:
    """Show what the model will see: counts, lengths, broken records, and samples with the supervised tokens coloured."""
    checked = load_recipe(recipe, list(overrides or []))
    with data_progress() as on_progress:
        _, prepared = prepare_for_model(checked, _reader_of(checked), progress=on_progress)
    length = run_length(checked, len(prepared.train), nproc)
    shown = show_samples(checked, prepared, "validation" if validation else "train", position, samples)
    if json_output:
        sys.stdout.write(json.dumps(as_json(checked, prepared, length, shown), ensure_ascii=False) + "\n")
    else:
        open_console(highlight=False).print(render(checked, prepared, length, shown))


def _reader_of(recipe: Recipe) -> ReadShape:
    """How the model's shape is found; torch comes in only for one that our decoder does not know."""
    config = recipe.model.config if recipe.model.config is not None else recipe.model.path
    assert config is not None  # the schema demands one of them
    if read_content(config).get("model_type") in FAMILIES:
        return read_config
    from shardwright.model.theirs import read_shape

    return partial(read_shape, section=recipe.model)


def run_length(recipe: Recipe, num_samples: int, num_ranks: int | None) -> RunLength:
    """Steps and epochs of the run on `num_ranks`; None takes the data ranks that the recipe's layout names, or one."""
    if num_ranks is not None:
        _, batch = resolve_degrees(recipe, num_ranks)
    else:
        batch = resolve_batch(recipe.training, (recipe.layout.dp_replicate or 1) * (recipe.layout.dp_shard or 1))
    num_steps = count_steps(recipe.training, num_samples, batch.global_batch_size)
    size = batch.global_batch_size
    return RunLength(size, batch.data_ranks, num_steps, num_steps * size / num_samples)


def show_samples(recipe: Recipe, prepared: Prepared, side: Side, position: int, count: int) -> list[ShownSample]:
    """The samples that the run reads at `position` and after it."""
    dataset: TokenDataset | None = prepared.train if side == "train" else prepared.validation
    if dataset is None:
        raise RecipeError("there is no validation side", field="data.validation_fraction", got=0, remedy="Hold something out")
    order = SampleOrder(recipe.seed, len(dataset))
    shown = []
    for here in range(position, position + count):
        if side == "validation" and here >= len(dataset):
            break
        index, epoch = (order.index_at(here), order.epoch_at(here)) if side == "train" else (here, 0)
        sample = dataset.sample(index, epoch)
        spans = read_spans(sample, prepared.tokenizer)
        num_free = sample.num_free
        supervised = sum(span.num_tokens for span in spans if span.supervised)
        shown.append(ShownSample(side, here, index, len(sample.labels) - num_free, supervised, num_free, spans))
    return shown


def as_json(recipe: Recipe, prepared: Prepared, length: RunLength, shown: list[ShownSample]) -> dict[str, Any]:
    """Everything that the terminal shows; neighbouring tokens of a sample that are supervised alike are one span."""
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
            "num_tokens": length.num_steps * length.global_batch_size * recipe.training.sequence_length,
        },
        "samples": [
            {
                "side": sample.side,
                "position": sample.position,
                "index": sample.index,
                "num_tokens": sample.num_tokens,
                "num_supervised": sample.num_supervised,
                "num_free_positions": sample.num_free,
                "spans": [
                    {"text": span.text, "num_tokens": span.num_tokens, "supervised": span.supervised, "document": span.document}
                    for span in _joined(sample.spans)
                ],
            }
            for sample in shown
        ],
    }


def _joined(spans: list[Span]) -> Iterator[Span]:
    held: Span | None = None
    for span in spans:
        if held is not None and (held.supervised, held.document) == (span.supervised, span.document):
            held = Span(held.text + span.text, held.num_tokens + span.num_tokens, held.supervised, held.document)
        else:
            if held is not None:
                yield held
            held = span
    if held is not None:
        yield held


def render(recipe: Recipe, prepared: Prepared, length: RunLength, shown: list[ShownSample]) -> RenderableType:
    """The whole of it for a terminal."""
    parts: list[RenderableType] = [_sources(recipe, prepared), _formats(prepared), Text(), _sides(recipe, prepared)]
    parts += [_run(recipe, length, prepared.report.packing), Text()]
    if prepared.report.train.counts.num_documents > 1:
        parts.append(_histogram(prepared.report.train, recipe.training.sequence_length))
    if prepared.report.records.num_broken:
        parts += [Text(), _broken(prepared)]
    parts += [panel for sample in shown for panel in (Text(), _sample_panel(sample, recipe.training.sequence_length))]
    if shown:
        parts.append(
            Text.assemble(
                "  ", ("super", "green"), ("vised", "cyan"), " tokens take turns in colour; ", ("dim", "dim"), " ones are only seen"
            )
        )
    return Group(*parts)


def _sources(recipe: Recipe, prepared: Prepared) -> Text:
    report = prepared.report
    records = report.records
    facts = [_plural(report.num_files, "file"), _plural(records.num_records, "record")]
    if records.num_empty_files:
        facts.append(f"{_plural(records.num_empty_files, 'empty file')} left out")
    if report.num_duplicates_dropped:
        facts.append(f"{_plural(report.num_duplicates_dropped, 'held-out duplicate')} dropped")
    text = Text.assemble((recipe.name, "bold"), "  ", " · ".join(facts))
    if records.num_broken:
        text.append(f" · {records.num_broken:,} broken ({records.broken_fraction:.2%})", style="yellow")
    asked = recipe.tokenizer.vocab_size
    fewer = f" ({asked:,} asked for, but no further pair occurs twice)" if asked and report.vocab_size < asked else ""
    if report.tokenizer_kind == "none":
        tokenizer = f"no tokenizer: samples are shown as token ids, of a vocabulary of {report.vocab_size:,}"
    else:
        tokenizer = f"tokenizer {report.tokenizer_kind}, {report.vocab_size:,} ids{fewer}"
    text.append(f"\n{tokenizer} · {_packing(recipe, report.packing)}")
    if report.supervise is not None:
        template = f" · chat template: {report.template}" if report.template else " · no chat template"
        text.append(f"\nsupervised: {_SUPERVISED[report.supervise]}{template}")
    text.append("\n")
    return text


def _packing(recipe: Recipe, packing: str) -> str:
    length = recipe.training.sequence_length
    size = f"at most {length:,} tokens" if recipe.data.padding == "longest" else f"{length:,} tokens"
    return {
        "windows": f"windows of {length:,} tokens, cut anew in every epoch",
        "documents": f"documents packed into rows of {length:,} tokens, none seeing another",
        "none": f"a row of {size} for each document, not packed",
        "pairs": f"a row of {size} for each pair: the chosen response, then the rejected one",
    }[packing]


def _formats(prepared: Prepared) -> Table:
    """What each source was found to hold, and in which columns."""
    sources = prepared.report.sources
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="bold")
    table.add_column("source", overflow="fold")
    table.add_column("holds")
    table.add_column("documents", justify="right")
    if any(source.weight is not None for source in sources):
        table.add_column("weight", justify="right")
        table.add_column("of an epoch", justify="right")
    for source in sources:
        holds = ", ".join(KINDS[kind].summary for kind in source.records.split(", ") if kind)
        named = [name if name == role else f"{role}: {name}" for role, name in source.columns]
        columns = ", ".join(named) if len(named) > 1 or ": " in "".join(named) else ""
        columns = f" ({columns})" if columns else ""
        cells: list[RenderableType] = [
            Text(source.path),
            Text.assemble(holds, (columns, "dim")),
            f"{source.num_documents:,}",
        ]
        if source.weight is not None and source.share is not None:
            cells += [f"{source.weight:g}", f"{source.share:.1%}"]
        table.add_row(*cells)
    return table


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _sides(recipe: Recipe, prepared: Prepared) -> Table:
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

    found = list(sides.values())
    row("documents", *(f"{side.counts.num_documents:,}" for side in found))
    row("characters", *(f"{side.counts.num_characters:,}" for side in found))
    row("tokens", *(f"{side.counts.num_tokens:,}" for side in found))
    row("characters per token", *(f"{side.counts.num_characters / max(1, side.counts.num_tokens):.2f}" for side in found))
    row("samples", *(f"{side.num_samples:,}" for side in found))
    row("supervised", *(f"{side.num_supervised / (side.num_samples * length):.2%}" for side in found))
    if prepared.report.packing != "windows":
        row(
            "padding of full rows" if recipe.data.padding == "longest" else "padding",
            *(f"{side.padding_fraction:.2%}" for side in found),
        )
    for label, counts in (
        ("longer than a sample: cut", [side.num_cut for side in found]),
        ("longer than a sample: left out", [side.num_dropped for side in found]),
        ("pieces with nothing to learn", [side.num_unsupervised_pieces for side in found]),
    ):
        if any(counts):
            row(label, *(Text(f"{count:,}", "yellow") if count else "0" for count in counts))
    if any(side.counts.num_weighted for side in found):
        row("tokens of another loss weight than 1", *(f"{side.counts.num_weighted:,}" for side in found))
    if any(side.counts.num_unknown for side in found):
        row("unknown tokens", *(Text(f"{side.counts.num_unknown:,}", "yellow") for side in found))
    return table


def _run(recipe: Recipe, length: RunLength, packing: str) -> Text:
    at_most = "at most " if packing != "windows" and recipe.data.padding == "longest" else ""
    tokens = length.global_batch_size * recipe.training.sequence_length
    ranks = "" if recipe.training.global_batch_size else f" on {_plural(length.data_ranks, 'data rank')}"
    text = Text.assemble(
        "\nthe run reads ",
        (f"{length.num_epochs:.3g} epochs", "bold"),
        f": {_plural(length.num_steps, 'step')} of {length.global_batch_size:,} x {recipe.training.sequence_length:,}"
        f" = {at_most}{tokens:,} tokens{ranks}",
    )
    if not length.num_steps:
        text.append("; not one global batch is filled", style="red")
    return text


def _histogram(side: SideReport, sequence_length: int) -> Table:
    """Documents by length in tokens, and where the sequence length lies."""
    table = Table(box=None, padding=(0, 2, 0, 0), title="training documents by length", title_justify="left", title_style="bold")
    table.add_column("tokens", justify="right", style="dim")
    table.add_column("", justify="right")
    table.add_column("", width=40)
    most = max((count for _, count in side.length_histogram), default=0)
    first = next((number for number, (_, count) in enumerate(side.length_histogram) if count), 0)
    for upper, count in side.length_histogram[first:]:
        fits = upper <= sequence_length
        bar = Bar(most, 0, count, width=40, color="green" if fits else "blue")
        table.add_row(f"<= {upper:,}", f"{count:,}", bar)
    if any(count and upper > sequence_length for upper, count in side.length_histogram):
        table.caption = f"blue: may be longer than a sample of {sequence_length:,}"
        table.caption_justify = "left"
        table.caption_style = "dim"
    return table


def _broken(prepared: Prepared) -> Text:
    records = prepared.report.records
    text = Text.assemble((f"set aside: {_plural(records.num_broken, 'broken record')}", "yellow bold"))
    for item in records.broken[:NUM_BROKEN_SHOWN]:
        text.append(f"\n  {item.file}:{item.line} ").append(item.reason, style="dim")
    if records.num_broken > NUM_BROKEN_SHOWN:
        text.append(f"\n  and {records.num_broken - NUM_BROKEN_SHOWN:,} more", style="dim")
    return text


def _sample_panel(sample: ShownSample, sequence_length: int) -> Panel:
    several_characters = sum(len(span.text) for span in sample.spans) > 1.5 * len(sample.spans)
    text = Text()
    for number, span in enumerate(sample.spans[:NUM_TOKENS_SHOWN]):
        if number and span.document != sample.spans[number - 1].document:
            text.append("\n" + "─" * 24 + "\n", style="dim")
        # Colours take turns so that token borders show; with a token per character they would only flicker.
        style = _TOKEN_STYLES[number % 2 if several_characters else 0] if span.supervised else "dim"
        text.append(_visible(span.text), style=style)
    if len(sample.spans) > NUM_TOKENS_SHOWN:
        text.append(f"\n... {len(sample.spans) - NUM_TOKENS_SHOWN:,} tokens more", style="dim italic")
    num_documents = len({span.document for span in sample.spans})
    facts = [f"{sample.side} position {sample.position:,}", f"sample {sample.index:,}"]
    facts += [_plural(num_documents, "document")] if num_documents > 1 else []
    facts.append(f"{sample.num_supervised:,} of {sequence_length:,} supervised")
    facts += [f"{_plural(sample.num_free, 'position')} free"] if sample.num_free else []
    return Panel(text, title=Text(" · ".join(facts), style="bold"), title_align="left", border_style="dim", padding=(0, 1))


def _visible(text: str) -> str:
    """Line ends and tabs marked, other control characters as their pictures: a corpus cannot steer the terminal."""
    marks = {"\n": "↵\n", "\t": "→   ", "\x7f": "␡"}
    return "".join(marks.get(character) or _picture(character) for character in text)


def _picture(character: str) -> str:
    if character < " ":
        return chr(0x2400 + ord(character))
    return character if character.isprintable() or character == " " else f"<U+{ord(character):04X}>"
