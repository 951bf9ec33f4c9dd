"""Our saved tokenizers give the same ids in transformers' AutoTokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from shardwright.data.tokens.tokenizer import Tokenizer
from shardwright.data.tokens.tokenizer_loading import (
    describe_tokenizer_difference,
    load_tokenizer,
    train_bpe,
    train_characters,
)

TEXT = "def f(x):\n    return  x + 1  # größer\n\n\nclass A:\r\n\tpass\n"
EDGES = ["", " ", "\n", "  return", "x\n", "\n\n x", "größer", TEXT]


@pytest.fixture(params=["bpe", "character"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return (
        train_bpe(iter([TEXT] * 3), 290)
        if request.param == "bpe"
        else train_characters(iter([TEXT]))
    )


def test_autotokenizer_gives_the_same_ids(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    hf_tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for text in EDGES:
        ids = tokenizer.encode(text)
        assert hf_tokenizer(text)["input_ids"] == ids
        assert hf_tokenizer.decode(ids) == text == tokenizer.decode(ids)
    assert hf_tokenizer.eos_token_id == tokenizer.eos_id
    assert len(hf_tokenizer) == tokenizer.vocab_size


def test_a_folder_without_tokenizer_json_is_loaded_by_transformers(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "red", "fox", "##es"])
    )
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    tokenizer = load_tokenizer(tmp_path)
    hf_tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert (tokenizer.prefix_ids, tokenizer.suffix_ids, tokenizer.unknown_id) == ((2,), (3,), 1)
    assert [*tokenizer.encode("red foxes"), *tokenizer.suffix_ids] == hf_tokenizer("red foxes")[
        "input_ids"
    ]
    tokenizer.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").content_hash == tokenizer.content_hash


def test_real_folders_give_the_same_ids(outside_data: Path) -> None:
    folder = outside_data / "models" / "babyllama105"
    ours = load_tokenizer(folder)
    hf_tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in ("Once upon a time", "two  spaces", "?"):
        assert ours.encode(text) == hf_tokenizer(text)["input_ids"]


@pytest.mark.parametrize(("family", "is_same"), [("llama", True), ("qwen2", False)])
def test_a_tokenizer_that_transformers_replaces_is_described(
    tmp_path: Path, family: str, is_same: bool
) -> None:
    """For qwen2, transformers takes its own pre-tokenizer, which splits numbers into digits."""
    tokenizer = train_bpe(iter(["It's the 12,345th test: 7 + 8 = 15! " * 20]), 290)
    tokenizer.save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    difference = describe_tokenizer_difference(tmp_path, tokenizer)
    if is_same:
        assert difference is None
    else:
        assert difference is not None
        assert "loads Qwen2Tokenizer, which gives other ids" in difference
        assert "PreTrainedTokenizerFast" in difference


def test_a_tokenizer_of_characters_and_a_real_one_are_the_same_in_transformers(
    tmp_path: Path, outside_data: Path
) -> None:
    characters = train_characters(iter([TEXT]))
    characters.save(tmp_path)
    assert describe_tokenizer_difference(tmp_path, characters) is None
    folder = outside_data / "models" / "babyllama105"
    assert describe_tokenizer_difference(folder, load_tokenizer(folder)) is None
