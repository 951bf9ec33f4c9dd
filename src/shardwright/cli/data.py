"""`shardwright data`: show the training data as the model will see it. Needs no torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any

import typer

from shardwright.architecture import MODEL_FAMILIES, read_config, read_content
from shardwright.cli.options import JsonOutput, Overrides, RecipePath
from shardwright.cli.output.console import open_console, print_table
from shardwright.cli.output.data_progress import show_data_progress
from shardwright.cli.output.data_table import render_report
from shardwright.cli.output.json_output import print_json
from shardwright.config import Recipe, load_recipe
from shardwright.data.model_data import ReadShape, prepare_for_model
from shardwright.data.prepared_data import PreparedData
from shardwright.data.preview import (
    DecodedSample,
    PreviewSpan,
    TrainingLength,
    compute_training_length,
    decode_samples,
)
from shardwright.data.tokens.token_export import write_prepared_tokens
from shardwright.masking import mask_secrets


def data_command(
    recipe: RecipePath,
    overrides: Overrides = None,
    samples: Annotated[
        int, typer.Option("--samples", min=0, help="Number of decoded samples to show.")
    ] = 2,
    position: Annotated[
        int,
        typer.Option(
            "--position", min=0, help="Position of the first shown sample in the run's order."
        ),
    ] = 0,
    validation: Annotated[
        bool, typer.Option("--validation", help="Show validation samples.")
    ] = False,
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", min=1, help="Ranks of the run, which set its batch size."),
    ] = None,
    write_tokens: Annotated[
        str | None,
        typer.Option(
            "--write-tokens",
            metavar="FOLDER",
            help="Write the token ids to a folder or URL, which `format: tokens` reads.",
        ),
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
        loaded_recipe,
        prepared,
        "validation" if validation else "train",
        position,
        samples,
        length.global_batch_size,
    )
    written = None if write_tokens is None else write_prepared_tokens(prepared, write_tokens)
    if written is not None:
        sys.stderr.write(f"{mask_secrets(write_tokens or '')}: {written.describe()}\n")
    if json_output:
        content = build_json(loaded_recipe, prepared, length, decoded)
        if written is not None:
            content["written_tokens"] = written._asdict()
        print_json(content, ensure_ascii=False)
    else:
        console = open_console()
        has_colours = console.color_system is not None and not console.no_color
        report = render_report(loaded_recipe, prepared, length, decoded, has_colours=has_colours)
        print_table(console, report, min_width=0)


def _choose_shape_reader(recipe: Recipe) -> ReadShape:
    """Return the reader of the model's shape.

    Torch is imported only for families that our decoder does not support.
    """
    config = recipe.model.config if recipe.model.config is not None else recipe.model.path
    assert config is not None  # one of them is required by the schema
    if read_content(config).get("model_type") in MODEL_FAMILIES:
        return read_config
    from shardwright.model.hf.hf_model import read_model_shape

    return partial(read_model_shape, section=recipe.model)


def build_json(
    recipe: Recipe, prepared: PreparedData, length: TrainingLength, samples: list[DecodedSample]
) -> dict[str, Any]:
    """Return everything that the terminal shows.

    Consecutive tokens with the same supervision are joined into one span.
    """
    return {
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
