"""Tables, histogram and coloured samples of `shardwright data`."""

from __future__ import annotations

from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from shardwright.config import Recipe
from shardwright.data.data_report import SideReport
from shardwright.data.prepared_data import PreparedData
from shardwright.data.preview import DecodedSample, TrainingLength
from shardwright.data.records.record_formats import RECORD_KINDS
from shardwright.data.scheduled_mixture import build_weight_schedule
from shardwright.units import format_items

MAX_BROKEN_SHOWN = 8
_SUPERVISION_TEXTS = {
    "assistant": "assistant turns and responses",
    "last": "last assistant turn",
    "all": "all tokens",
}
MAX_TOKENS_SHOWN = 400
_TOKEN_STYLES = ("green", "cyan")
_SUPERVISED_BRACKETS = ("⟦", "⟧")
"""They enclose supervised tokens where there are no colours: in a file, a pipe, with NO_COLOR."""


def render_report(
    recipe: Recipe,
    prepared: PreparedData,
    length: TrainingLength,
    samples: list[DecodedSample],
    *,
    has_colours: bool = True,
) -> RenderableType:
    """Render the complete report for a terminal; without colours, brackets enclose what is
    supervised."""
    parts: list[RenderableType] = [
        _render_sources(recipe, prepared),
        _render_formats(prepared, has_shares=not recipe.data.weight_schedule),
        *_render_schedule(recipe),
        Text(),
        _render_sides(recipe, prepared),
    ]
    parts += [_render_training_length(recipe, length, prepared.report.packing), Text()]
    if prepared.report.train.counts.num_documents > 1:
        parts.append(
            _render_histogram(
                prepared.report.train, recipe.training.sequence_length, has_colours=has_colours
            )
        )
    if prepared.report.records.num_broken:
        parts += [Text(), _render_broken(prepared)]
    parts += [
        panel
        for sample in samples
        for panel in (
            Text(),
            _render_sample(sample, recipe.training.sequence_length, has_colours=has_colours),
        )
    ]
    if samples and not has_colours:
        opening, closing = _SUPERVISED_BRACKETS
        parts.append(Text(f"  {opening}supervised tokens{closing} are in brackets"))
    elif samples:
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
    facts = [format_items(report.num_files, "file"), format_items(records.num_records, "record")]
    if records.num_empty_files:
        facts.append(f"{format_items(records.num_empty_files, 'empty file')} skipped")
    if report.num_duplicates_dropped:
        facts.append(f"{format_items(report.num_duplicates_dropped, 'held-out duplicate')} dropped")
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


def _render_formats(prepared: PreparedData, *, has_shares: bool) -> Table:
    """List the sources with the detected kind and columns of their records, and with weights and
    shares that hold for the whole run."""
    sources = prepared.report.sources
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="bold")
    table.add_column("source", overflow="fold")
    table.add_column("records")
    table.add_column("documents", justify="right")
    if has_shares and any(source.weight is not None for source in sources):
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
        if has_shares and source.weight is not None and source.share is not None:
            cells += [f"{source.weight:g}", f"{source.share:.1%}"]
        table.add_row(*cells)
    return table


def _render_schedule(recipe: Recipe) -> list[Text]:
    """List the shares of the sources, in their order, at the steps that a schedule names."""
    schedule = build_weight_schedule(recipe.data)
    if schedule is None or not recipe.data.weight_schedule:
        return []
    change = "linear between these steps" if schedule.is_linear else "constant between these steps"
    lines = [Text(f"share of the samples, {change}", style="bold")]
    for step, _ in schedule.knots:
        shares = ", ".join(f"{share:.1%}" for share in schedule.get_shares(step))
        lines.append(Text(f"  from step {step:,}: {shares}"))
    return lines


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
        else f" on {format_items(length.data_ranks, 'data rank')}"
    )
    text = Text.assemble(
        "\nthe run reads ",
        (f"{length.num_epochs:.3g} epochs", "bold"),
        f": {format_items(length.num_steps, 'step')} of {length.global_batch_size:,} x "
        f"{recipe.training.sequence_length:,}"
        f" = {at_most}{tokens:,} tokens{ranks}",
    )
    if not length.num_steps:
        text.append("; the data does not fill one global batch", style="red")
    return text


def _render_histogram(side: SideReport, sequence_length: int, *, has_colours: bool) -> Table:
    """Show documents by length in tokens, compared with the sequence length."""
    table = Table(
        box=None,
        padding=(0, 2, 0, 0),
        title="training documents by length",
        title_justify="left",
        title_style="bold",
    )
    table.add_column("tokens", justify="right", style="dim", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("", max_width=40)  # shorter in a narrow terminal
    largest = max((count for _, count in side.length_histogram), default=0)
    first = next((number for number, (_, count) in enumerate(side.length_histogram) if count), 0)
    for upper, count in side.length_histogram[first:]:
        fits = upper <= sequence_length
        bar = Bar(largest, 0, count, color="green" if fits else "blue")
        mark = "" if fits or has_colours else "* "
        table.add_row(f"{mark}<= {upper:,}", f"{count:,}", bar)
    if any(count and upper > sequence_length for upper, count in side.length_histogram):
        mark = "blue" if has_colours else "*"
        table.caption = f"{mark}: possibly longer than a sample of {sequence_length:,}"
        table.caption_justify = "left"
        table.caption_style = "dim"
    return table


def _render_broken(prepared: PreparedData) -> Text:
    records = prepared.report.records
    text = Text.assemble(
        (f"skipped: {format_items(records.num_broken, 'broken record')}", "yellow bold")
    )
    for item in records.broken[:MAX_BROKEN_SHOWN]:
        text.append(f"\n  {item.file}:{item.line} ").append(item.reason, style="dim")
    if records.num_broken > MAX_BROKEN_SHOWN:
        text.append(f"\n  and {records.num_broken - MAX_BROKEN_SHOWN:,} more", style="dim")
    return text


def _render_sample(
    sample: DecodedSample, sequence_length: int, *, has_colours: bool
) -> RenderableType:
    several_characters = sum(len(span.text) for span in sample.spans) > 1.5 * len(sample.spans)
    text = Text()
    shown = sample.spans[:MAX_TOKENS_SHOWN]
    for number, span in enumerate(shown):
        if number and span.document != shown[number - 1].document:
            text.append("\n" + "─" * 24 + "\n", style="dim")
        # Colours alternate to show token boundaries; with one token per character they would
        # flicker.
        style = (
            _TOKEN_STYLES[number % 2 if several_characters else 0] if span.is_supervised else "dim"
        )
        opening = ""
        closing = ""
        if span.is_supervised and not has_colours:
            if number == 0 or not shown[number - 1].is_supervised:
                opening = _SUPERVISED_BRACKETS[0]
            if number + 1 == len(shown) or not shown[number + 1].is_supervised:
                closing = _SUPERVISED_BRACKETS[1]
        text.append(f"{opening}{_escape_control_characters(span.text)}{closing}", style=style)
    if len(sample.spans) > MAX_TOKENS_SHOWN:
        text.append(
            f"\n... {len(sample.spans) - MAX_TOKENS_SHOWN:,} more tokens", style="dim italic"
        )
    num_documents = len({span.document for span in sample.spans})
    facts = [format_items(num_documents, "document")] if num_documents > 1 else []
    facts.append(f"{sample.num_supervised:,} of {sequence_length:,} supervised")
    facts += (
        [f"{format_items(sample.num_padding, 'position')} of padding"] if sample.num_padding else []
    )
    return Panel(
        text,
        title=Text(f"{sample.side} position {sample.position:,} · sample {sample.index:,}", "bold"),
        title_align="left",
        subtitle=Text(" · ".join(facts)),  # one line for all would not fit 80 columns
        subtitle_align="left",
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
