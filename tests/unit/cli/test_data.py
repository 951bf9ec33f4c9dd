"""`shardwright data`: its text and its JSON."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from rich.console import Console

from shardwright.cli.data import build_json, data_command
from shardwright.cli.output.data_table import _render_histogram, render_report
from shardwright.config import Recipe
from shardwright.config.model import TokenizerSection
from shardwright.config.recipe_loading import validate_recipe
from shardwright.data.data_report import SideReport
from shardwright.data.model_data import prepare_for_model
from shardwright.data.preview import compute_training_length, decode_samples, read_spans
from shardwright.errors import ArchitectureError, InputError, RecipeError
from tests.unit.data.recipes import story, write_json_lines
from tests.unit.data.test_tokenizer import save_folder, sentencepiece_like

MODEL = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


def make_document(folder: Path, **data: Any) -> dict[str, Any]:
    path = write_json_lines(
        folder / "a.jsonl", [story(number, 1 + number % 7) for number in range(80)]
    )
    with open(path, "a") as stream:
        stream.write("not json\n")
    return {
        "name": "stories",
        "model": {"config": dict(MODEL)},
        "tokenizer": {"kind": "bpe", "vocab_size": 280},
        "data": {
            "sources": path,
            "cache_dir": str(folder / "cache"),
            "packing": "documents",
            "validation_fraction": 0.2,
            "max_broken_fraction": 0.02,
            **data,
        },
        "training": {
            "sequence_length": 32,
            "micro_batch_size": 2,
            "max_steps": 30,
            "learning_rate": 1e-3,
        },
    }


def make_recipe(folder: Path, **data: Any) -> Recipe:
    return validate_recipe(make_document(folder, **data))


def print_report(recipe: Recipe, **show: Any) -> str:
    prepared = prepare_for_model(recipe)[1]
    shown = decode_samples(
        recipe, prepared, show.get("side", "train"), show.get("position", 0), 2, 1
    )
    length = compute_training_length(recipe, len(prepared.train), None)
    console = Console(width=100, record=True, quiet=False, file=io.StringIO())
    console.print(render_report(recipe, prepared, length, shown))
    return console.export_text(styles=bool(show.get("styles")))


def test_spans_are_the_sample_as_text(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    prepared = prepare_for_model(recipe)[1]
    for index in range(len(prepared.train)):
        sample = prepared.train.get_sample(index)
        spans = read_spans(sample, prepared.tokenizer)
        supervised = sum(span.num_tokens for span in spans if span.is_supervised)
        assert supervised == int((sample.labels != -100).sum())
        by_document: dict[int, list[Any]] = {}
        for span in spans:
            by_document.setdefault(span.document, []).append(span)
        for document in by_document.values():
            assert not document[0].is_supervised, "nothing predicts the first token of a document"
            assert all(span.is_supervised for span in document[1:])
            assert document[-1].text == "<|endoftext|>"
        assert len(spans) - len(by_document) + sample.num_padding == 32


def test_a_character_of_several_tokens_is_one_span(tmp_path: Path) -> None:
    path = write_json_lines(tmp_path / "b.jsonl", ["abc \N{GRINNING FACE} größe"])
    recipe = make_recipe(tmp_path, sources=path, validation_fraction=0.0)
    prepared = prepare_for_model(recipe)[1]
    spans = read_spans(prepared.train.get_sample(0), prepared.tokenizer)
    assert "".join(span.text for span in spans) == "abc \N{GRINNING FACE} größe<|endoftext|>"
    assert any(span.num_tokens > 1 and "\N{GRINNING FACE}" in span.text for span in spans)


def test_the_terminal_shows_counts_broken_records_and_samples(tmp_path: Path) -> None:
    text = print_report(make_recipe(tmp_path))
    for words in (
        "1 file · 81 records · 1 broken (1.23%)",
        "tokenizer bpe, 280 ids",
        "a.jsonl:81 not JSON",
        "30 steps of 2 x 32 = at most 64 tokens on 1 data rank",
        "train position 0",
        "of 32 supervised",
        "characters per token",
        "training documents by length",
    ):
        assert words in text, text


def test_supervised_tokens_are_coloured_and_others_dim(tmp_path: Path) -> None:
    text = print_report(make_recipe(tmp_path), styles=True)
    assert "\x1b[32m" in text
    assert "\x1b[36m" in text
    assert "\x1b[2m" in text


def test_the_histogram_has_its_lengths_in_a_narrow_terminal_and_without_colours() -> None:
    """The bars took 40 columns, and the lengths the rest; `blue` means nothing without colours."""
    side = cast(SideReport, SimpleNamespace(length_histogram=((16, 3), (1024, 40))))
    printed = io.StringIO()
    table = _render_histogram(side, 32, has_colours=False)
    Console(file=printed, width=40).print(table)
    lines = [line.split() for line in printed.getvalue().splitlines()]
    assert [line[:3] for line in lines[2:4]] == [["<=", "16", "3"], ["*", "<=", "1,024"]]
    assert "*: possibly longer" in printed.getvalue()
    assert "blue" not in printed.getvalue()


def test_supervised_tokens_are_in_brackets_without_colours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Bye"}]
    chats = tmp_path / "chats.jsonl"
    chats.write_text("\n".join([json.dumps({"messages": messages})] * 40))
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages %}{% if m['role'] == 'assistant' %}A:{% generation %}"
        "{{ m['content'] + eos_token }}{% endgeneration %}{% else %}U:{{ m['content'] }}"
        "{% endif %}{% endfor %}"
    )
    document = make_document(
        tmp_path, sources=str(chats), chat_template=str(template), validation_fraction=0.0
    )
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(document))
    data_command(path, samples=1)
    output = capsys.readouterr().out
    assert "U:HiA:⟦Bye<|endoftext|>⟧" in output
    assert "are in brackets" in output
    assert "alternate in colour" not in output


def test_a_corpus_cannot_send_terminal_codes(tmp_path: Path) -> None:
    path = write_json_lines(tmp_path / "b.jsonl", ["\x1b[2J \x07 \t [red]x[/red] \x9b"])
    text = print_report(make_recipe(tmp_path, sources=path, validation_fraction=0.0), styles=True)
    assert "\x1b[2J" not in text
    assert "\x07" not in text
    assert "\x9b" not in text
    plain = print_report(make_recipe(tmp_path, sources=path, validation_fraction=0.0))
    assert "␛[2J" in plain
    assert "[red]x[/red]" in plain


def test_samples_are_those_of_the_run(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    prepared = prepare_for_model(recipe)[1]
    from_start = decode_samples(recipe, prepared, "train", 0, 4, 1)
    later = decode_samples(recipe, prepared, "train", 2, 2, 1)
    assert from_start[2:] == later
    validation = decode_samples(recipe, prepared, "validation", 0, 10_000, 1)
    assert prepared.validation is not None
    assert [sample.index for sample in validation] == list(range(len(prepared.validation)))


@pytest.mark.parametrize(
    ("training", "num_ranks", "expected"),
    [
        ({"micro_batch_size": 2, "max_steps": 10}, None, (2, 1, 10, 0.2)),
        ({"micro_batch_size": 2, "max_steps": 10}, 4, (8, 4, 10, 0.8)),
        ({"global_batch_size": 20, "num_epochs": 2.0}, None, (20, 1, 10, 2.0)),
        ({"global_batch_size": 30, "num_epochs": 1.0, "max_steps": 9}, 2, (30, 2, 3, 0.9)),
    ],
)
def test_run_length(
    tmp_path: Path, training: dict[str, Any], num_ranks: int | None, expected: tuple[Any, ...]
) -> None:
    document = make_document(tmp_path)
    document["training"] = {"sequence_length": 32, "learning_rate": 1e-3, **training}
    length = compute_training_length(validate_recipe(document), 100, num_ranks)
    assert (
        length.global_batch_size,
        length.data_ranks,
        length.num_steps,
        length.num_epochs,
    ) == pytest.approx(expected)


def test_json_contains_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(make_document(tmp_path)))
    data_command(path, overrides=["seed=5"], samples=1, json_output=True)
    output = json.loads(capsys.readouterr().out)
    assert output["schema_version"] == 1
    assert output["records"]["broken"][0] | {"reason": ""} == {
        "record": 80, "file": "a.jsonl", "line": 81, "reason": "", "harmless": False
    }  # fmt: skip
    assert (
        output["train"]["counts"]["num_documents"] + output["validation"]["counts"]["num_documents"]
        == 80
    )
    assert output["run"]["num_steps"] == 30
    (sample,) = output["samples"]
    assert (
        sum(span["num_tokens"] for span in sample["spans"] if span["supervised"])
        == sample["num_supervised"]
    )


def test_text_goes_to_standard_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(make_document(tmp_path)))
    data_command(path, samples=0)
    assert "stories" in capsys.readouterr().out


def test_json_has_no_nan_or_infinity(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    prepared = prepare_for_model(recipe)[1]
    shown = decode_samples(recipe, prepared, "train", 0, 3, 1)
    content = build_json(
        recipe, prepared, compute_training_length(recipe, len(prepared.train), None), shown
    )
    assert json.loads(json.dumps(content, allow_nan=False)) == json.loads(json.dumps(content))


def test_wrong_input_is_refused(tmp_path: Path) -> None:
    document = make_document(tmp_path)
    document["training"]["sequence_length"] = 65
    with pytest.raises(InputError, match="65"):
        prepare_for_model(validate_recipe(document))
    document = make_document(tmp_path)
    document["model"]["config"]["hidden_act"] = "unheard"
    with pytest.raises(ArchitectureError):
        prepare_for_model(validate_recipe(document))
    recipe = make_recipe(tmp_path, validation_fraction=0.0)
    with pytest.raises(RecipeError, match="no validation data"):
        decode_samples(recipe, prepare_for_model(recipe)[1], "validation", 0, 1, 1)


def test_unsupervised_last_tokens_of_a_document_are_not_padding(tmp_path: Path) -> None:
    """Last tokens of a packed row may have id 0 and no label; `document` marks the padding."""
    path = tmp_path / "ids.jsonl"
    path.write_text(
        json.dumps({"input_ids": [5, 6, 0, 0, 0], "completion_mask": [0, 1, 1, 0, 0]}) + "\n"
    )
    recipe = make_recipe(
        tmp_path, sources=str(path), validation_fraction=0.0, cache_dir=str(tmp_path / "other")
    )
    recipe = recipe.model_copy(
        update={
            "tokenizer": TokenizerSection(
                path=str(save_folder(sentencepiece_like(), tmp_path / "t"))
            )
        }
    )
    prepared = prepare_for_model(recipe)[1]
    sample = prepared.train.get_sample(0)
    assert sample.num_padding == 32 - 4
    assert [span.is_supervised for span in read_spans(sample, prepared.tokenizer)] == [
        False,
        True,
        True,
        False,
    ]


def test_scheduled_weights_are_listed_by_step(tmp_path: Path) -> None:
    """The table named the first weights as the shares of every epoch."""
    paths = [
        write_json_lines(tmp_path / name, [story(number) for number in numbers])
        for name, numbers in (("b.jsonl", range(9)), ("c.jsonl", range(9, 18)))
    ]
    weighted = [{"path": paths[0], "weight": 9}, {"path": paths[1], "weight": 1}]
    settings: dict[str, Any] = {"sources": weighted, "validation_fraction": 0.0}
    assert "90.0%" in print_report(make_recipe(tmp_path, **settings))
    schedule = {
        "weight_schedule": [{"step": 2, "weights": [1, 1]}, {"step": 4, "weights": [0, 1]}],
        "weight_transition": "linear",
    }
    lines = print_report(make_recipe(tmp_path, **settings, **schedule)).splitlines()
    start = lines.index("share of the samples, linear between these steps")
    assert lines[start + 1 : start + 4] == [
        "  from step 0: 90.0%, 10.0%",
        "  from step 2: 50.0%, 50.0%",
        "  from step 4: 0.0%, 100.0%",
    ]
    assert not any("share of epoch" in line for line in lines)
