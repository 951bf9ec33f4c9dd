"""Files of token ids: written by `data --write-tokens`, read as sources, refused if wrong."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import yaml

from shardwright.cli.main import run
from shardwright.config import Recipe
from shardwright.data.preparation import prepare_data
from shardwright.data.prepared_data import PreparedData
from shardwright.data.records.token_files import HEADER_BYTES, read_header, read_token_file
from shardwright.data.tokens.token_export import write_prepared_tokens
from shardwright.errors import DataError, ExitCode, TokenizerError
from tests.unit.data.recipes import build_recipe, story, write_json_lines, write_text
from tests.unit.data.test_streaming import build_streamed, chat_folder, read_positions

TEXTS = [story(number, 6 + number % 9) for number in range(60)]
MODEL = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 8,
}


@pytest.fixture
def tokenizer(tmp_path: Path) -> dict[str, str]:
    chat_folder(tmp_path / "tokenizer")
    return {"kind": "huggingface", "path": str(tmp_path / "tokenizer")}


def build(folder: Path, sources: Any, tokenizer: dict[str, str], **data: Any) -> Recipe:
    return build_recipe(folder, sources, tokenizer=tokenizer, packing="documents", **data)


def write_sources(
    folder: Path, tokenizer: dict[str, str], max_file_tokens: int = 200
) -> tuple[PreparedData, Path]:
    """Write texts, and their tokens to several files; return the data of the texts."""
    source = write_json_lines(folder / "texts.jsonl", TEXTS)
    data = prepare_data(build(folder, source, tokenizer))
    target = folder / "tokens"
    written = write_prepared_tokens(data, str(target), max_file_tokens)
    assert len(written.files) > 2
    assert written.num_documents == len(TEXTS)
    assert written.num_tokens == data.report.train.counts.num_tokens
    return data, target / "train"


def assert_same_samples(data: PreparedData, expected: PreparedData) -> None:
    assert len(data.train) == len(expected.train)
    for number in range(len(data.train)):
        sample = data.train.get_sample(number)
        other = expected.train.get_sample(number)
        assert np.array_equal(sample.input_ids, other.input_ids)
        assert np.array_equal(sample.labels, other.labels)


def test_token_files_have_the_samples_of_the_text(
    tmp_path: Path, tokenizer: dict[str, str]
) -> None:
    expected, folder = write_sources(tmp_path, tokenizer)
    source = {"path": str(folder), "format": "tokens"}
    assert_same_samples(prepare_data(build(tmp_path, source, tokenizer)), expected)
    # Without a tokenizer, too.
    absent = build(tmp_path, source, {"kind": "huggingface"})
    assert_same_samples(prepare_data(absent, 1000), expected)


def test_the_mask_of_conversations_is_written(tmp_path: Path, tokenizer: dict[str, str]) -> None:
    records = [
        {"messages": [{"role": "user", "content": "ask"}, {"role": "assistant", "content": text}]}
        for text in TEXTS[:20]
    ]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    source = write_text(tmp_path / "chat.jsonl", lines)
    expected = prepare_data(build(tmp_path, source, tokenizer))
    write_prepared_tokens(expected, str(tmp_path / "tokens"))
    (path,) = (tmp_path / "tokens/train").iterdir()
    rows = list(read_token_file(path))
    assert any(0 in row["loss_mask"] and 1 in row["loss_mask"] for row in rows)
    again = {"path": str(path), "format": "tokens"}
    assert_same_samples(prepare_data(build(tmp_path, again, tokenizer)), expected)


def test_files_in_an_object_store_are_streamed_and_resumed_at_any_position(
    tmp_path: Path, tokenizer: dict[str, str]
) -> None:
    data, folder = write_sources(tmp_path, tokenizer)
    url = f"memory://bucket-{tmp_path.name}/tokens"
    write_prepared_tokens(data, url, 200)
    source = {"path": f"{url}/train", "format": "tokens"}
    recipe = build_streamed(tmp_path, source, packing="documents")
    streamed = prepare_data(recipe)
    everything = read_positions(streamed, range(40))
    assert read_positions(prepare_data(recipe), range(23, 31)) == everything[23:31]
    local = {"path": str(folder), "format": "tokens"}
    other = build_streamed(tmp_path, local, packing="documents")
    assert read_positions(prepare_data(other), range(40)) == everything
    assert_same_samples(prepare_data(build(tmp_path, source, tokenizer)), data)
    with pytest.raises(DataError, match=r"cannot contain this data.*streamed"):
        write_prepared_tokens(streamed, str(tmp_path / "other"))


def test_the_bytes_are_those_of_the_documentation(
    tmp_path: Path, tokenizer: dict[str, str]
) -> None:
    source = write_json_lines(tmp_path / "texts.jsonl", TEXTS[:2])
    data = prepare_data(build(tmp_path, source, tokenizer))
    write_prepared_tokens(data, str(tmp_path / "tokens"))
    content = (tmp_path / "tokens/train/00000-of-00001.swtokens").read_bytes()
    store = data.stores["train"]
    assert content[:8] == b"SWTOKENS"
    assert struct.unpack("<IIIIQQ", content[8:40]) == (
        1,
        2,
        0,
        data.tokenizer.vocab_size,
        2,
        len(store.tokens),
    )
    assert content[40:56].hex() == data.tokenizer.content_hash
    assert content[56:88] == hashlib.sha256(content[120:]).digest()
    assert content[88:120] == hashlib.sha256(content[:88]).digest()
    assert np.frombuffer(content[120:144], "<u8").tolist() == store.documents.tolist()
    assert np.frombuffer(content[144:], "<u2").tolist() == store.tokens.tolist()


def test_another_tokenizer_is_refused(tmp_path: Path, tokenizer: dict[str, str]) -> None:
    _, folder = write_sources(tmp_path, tokenizer)
    other = tmp_path / "other"
    chat_folder(other)
    document = json.loads((other / "tokenizer.json").read_text())
    document["added_tokens"][-1]["content"] = "<|another|>"
    (other / "tokenizer.json").write_text(json.dumps(document))
    source = {"path": str(folder), "format": "tokens"}
    wrong = {"kind": "huggingface", "path": str(other)}
    with pytest.raises(TokenizerError, match="another tokenizer") as caught:
        prepare_data(build(tmp_path, source, wrong))
    assert read_header(min(folder.iterdir())).tokenizer_hash in str(caught.value)
    recipe = build_streamed(tmp_path, source, packing="documents").model_copy(
        update={"tokenizer": build(tmp_path, source, wrong).tokenizer}
    )
    with pytest.raises(TokenizerError, match="another tokenizer"):
        prepare_data(recipe)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("truncated", r"damaged or truncated.*bytes"),
        ("short", "of the header"),
        ("longer", r"damaged or truncated.*bytes"),
        ("id", "another hash of the body"),
        ("header", "another hash of the header"),
        ("version", "version of the format .*got 2; allowed: 1"),
        ("another format", "not a file of token ids"),
    ],
)
def test_damaged_files_and_other_formats_are_errors(
    tmp_path: Path, tokenizer: dict[str, str], damage: str, message: str
) -> None:
    _, folder = write_sources(tmp_path, tokenizer)
    path = min(folder.iterdir())
    content = path.read_bytes()
    path.write_bytes(
        {
            "truncated": content[:-1],
            "short": content[: HEADER_BYTES - 1],
            "longer": content + b"\0",
            "id": content[:-1] + bytes([content[-1] ^ 1]),
            "header": content[:24] + bytes([content[24] ^ 1]) + content[25:],
            "version": content[:8] + b"\2\0\0\0" + content[12:],
            "another format": b"PAR1" + content[4:],
        }[damage]
    )
    for recipe in (
        build(tmp_path, {"path": str(folder), "format": "tokens"}, tokenizer),
        build_streamed(tmp_path, {"path": str(folder), "format": "tokens"}, packing="documents"),
    ):
        with pytest.raises(DataError, match=message):
            prepare_data(recipe)


def test_a_missing_file_is_an_error_unless_files_are_selected(
    tmp_path: Path, tokenizer: dict[str, str]
) -> None:
    _, folder = write_sources(tmp_path, tokenizer)
    first, second, *_ = sorted(folder.iterdir())
    second.unlink()
    source = {"path": str(folder), "format": "tokens"}
    for recipe in (
        build(tmp_path, source, tokenizer),
        build_streamed(tmp_path, source, packing="documents"),
    ):
        with pytest.raises(DataError, match=f"is missing.*no {second.name};"):
            prepare_data(recipe)
    selected = prepare_data(build(tmp_path, source | {"glob": first.name}, tokenizer))
    assert 0 < selected.report.train.counts.num_documents < len(TEXTS)


def test_the_format_is_named_and_data_that_it_cannot_express_is_refused(
    tmp_path: Path, tokenizer: dict[str, str]
) -> None:
    data, folder = write_sources(tmp_path, tokenizer)
    with pytest.raises(DataError, match="Set `format: tokens`"):
        prepare_data(build(tmp_path, str(min(folder.iterdir())), tokenizer))
    with pytest.raises(DataError, match="not empty"):
        write_prepared_tokens(data, str(folder))
    with pytest.raises(DataError, match=r"a file has this name .*\. Name another one$"):
        write_prepared_tokens(data, str(min(folder.iterdir())))
    turns = [
        {"role": "user", "content": "ask"},
        {"role": "assistant", "content": "one two", "loss_weight": 0.5},
    ]
    weighted = write_text(tmp_path / "weighted.jsonl", json.dumps({"messages": turns}) + "\n")
    heavy = prepare_data(build(tmp_path, weighted, tokenizer))
    with pytest.raises(DataError, match="loss weights"):
        write_prepared_tokens(heavy, str(tmp_path / "weighted"))


def test_the_command_writes_a_folder_and_an_object_store(
    tmp_path: Path, tokenizer: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    document = {
        "name": "texts",
        "model": {"config": MODEL},
        "tokenizer": tokenizer,
        "data": {
            "sources": write_json_lines(tmp_path / "texts.jsonl", TEXTS),
            "cache_dir": str(tmp_path / "cache"),
        },
        "training": {
            "sequence_length": 8,
            "micro_batch_size": 1,
            "max_steps": 1,
            "learning_rate": 1e-3,
        },
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(document))
    command = ["data", str(tmp_path / "recipe.yaml"), "--json"]
    url = f"memory://bucket-{tmp_path.name}/written"
    for target in (str(tmp_path / "out"), url):
        assert run([*command, "--write-tokens", target]) == ExitCode.DONE
        output = capsys.readouterr()
        assert json.loads(output.out)["written_tokens"]["num_documents"] == len(TEXTS)
        assert "60 documents" in output.err
    content = (tmp_path / "out/train/00000-of-00001.swtokens").read_bytes()
    with fsspec.open(f"{url}/train/00000-of-00001.swtokens", "rb") as stream:
        assert stream.read() == content
    assert run([*command, "--write-tokens", url]) == ExitCode.WRONG_INPUT
    assert "the folder is not empty" in capsys.readouterr().err
