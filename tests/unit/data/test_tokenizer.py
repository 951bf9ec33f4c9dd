"""Tokenizers: token ids, errors, and saving without changes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.data.tokens.tokenizer import CharacterTokenizer, FastTokenizer, Tokenizer
from shardwright.data.tokens.tokenizer_loading import (
    END_OF_TEXT,
    load_tokenizer,
    train_bpe,
    train_characters,
)
from shardwright.errors import TokenizerError
from tests.unit.data.recipes import story

TEXTS = [story(number, 40) for number in range(60)]


def train_small_bpe() -> FastTokenizer:
    return train_bpe(iter(TEXTS), 400)


def sentencepiece_like(**config: object) -> tokenizers.Tokenizer:
    """Build a tokenizer that, as Llama 2's, adds a BOS token and marks the start of every text."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, "▁": 3, "a": 4, "b": 5}
    fast = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>")
    )
    fast.add_special_tokens(["<unk>", "<s>", "</s>"])
    fast.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    fast.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.Fuse()]
    )
    fast.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return fast


def save_folder(fast: tokenizers.Tokenizer, folder: Path, **config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    fast.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_characters_are_numbered_by_code_point() -> None:
    tokenizer = train_characters(iter(["cab", "\n a"]))
    assert tokenizer.vocab_size == 5
    assert tokenizer.decode(range(5)) == "\n abc"
    assert tokenizer.encode("cab\n") == [4, 2, 3, 0]
    assert (tokenizer.eos_id, tokenizer.prefix_ids, tokenizer.suffix_ids) == (None, (), ())


@pytest.mark.parametrize("unknown", ["b", "z", "\N{GRINNING FACE}", "\x00"])
def test_a_character_without_an_id_is_named_in_the_error(unknown: str) -> None:
    with pytest.raises(TokenizerError, match=rf"U\+{ord(unknown):04X}"):
        CharacterTokenizer("acd").encode(f"aa{unknown}c")


@given(text=st.text(max_size=80))
@settings(max_examples=100, deadline=None)
def test_decoding_characters_inverts_encoding(text: str) -> None:
    tokenizer = CharacterTokenizer(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bpe_is_deterministic_and_learns_whole_words() -> None:
    first = train_small_bpe()
    second = train_small_bpe()
    assert first.content_hash == second.content_hash
    assert first.vocab_size == 400
    assert first.eos_id == 0
    assert first.decode([0]) == END_OF_TEXT
    assert len(first.encode(TEXTS[0])) < 0.6 * len(TEXTS[0])
    assert train_bpe(iter(TEXTS[:30]), 400).content_hash != first.content_hash


BPE = train_small_bpe()


@given(text=st.text(max_size=80))
@settings(max_examples=100, deadline=None)
def test_decoding_bytes_inverts_encoding_of_any_text(text: str) -> None:
    ids = BPE.encode(text)
    assert BPE.decode(ids) == text
    assert 0 not in ids, "no text encodes to the end of text"


def test_text_equal_to_a_control_token_is_encoded_as_text(tmp_path: Path) -> None:
    assert BPE.eos_id not in BPE.encode(f"before{END_OF_TEXT}after")
    loaded = load_tokenizer(save_folder(sentencepiece_like(), tmp_path, eos_token="</s>"))
    assert 2 not in loaded.encode("a</s>b")


@pytest.mark.parametrize("vocab_size", [1, 256])
def test_a_vocabulary_too_small_for_the_bytes_is_refused(vocab_size: int) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.vocab_size.*257 or more"):
        train_bpe(iter(TEXTS), vocab_size)


def test_text_without_enough_pairs_gives_fewer_tokens() -> None:
    assert train_bpe(iter(["ab ab ab"]), 1000).vocab_size < 300


@pytest.mark.parametrize(
    "tokenizer", [CharacterTokenizer("hello wörld\n"), BPE], ids=["character", "bpe"]
)
def test_saving_preserves_the_tokenizer(tmp_path: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(tmp_path / "first")
    loaded = load_tokenizer(tmp_path / "first")
    loaded.save(tmp_path / "second")
    reloaded = load_tokenizer(tmp_path / "second")
    for other in (loaded, reloaded):
        assert type(other) is type(tokenizer)
        assert other.content_hash == tokenizer.content_hash
        assert other.encode("hello wörld") == tokenizer.encode("hello wörld")
        assert (other.eos_id, other.vocab_size) == (tokenizer.eos_id, tokenizer.vocab_size)


def test_a_folder_is_copied_unchanged(tmp_path: Path) -> None:
    folder = save_folder(
        sentencepiece_like(), tmp_path / "first", eos_token="</s>", model_max_length=7
    )
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    load_tokenizer(folder).save(tmp_path / "second")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "second" / name).read_bytes() == (folder / name).read_bytes()


def test_prefix_and_suffix_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    fast = sentencepiece_like()
    tokenizer = load_tokenizer(
        save_folder(fast, tmp_path / "begin", eos_token={"content": "</s>", "special": True})
    )
    assert (tokenizer.prefix_ids, tokenizer.suffix_ids, tokenizer.eos_id) == ((1,), (2,), 2)
    assert tokenizer.encode("ab") == [1, 3, 4, 5], "a prompt has a prefix and no suffix"
    assert [ids.tolist() for ids in tokenizer.encode_pieces(["ab", "b"])] == [[3, 4, 5], [3, 5]]
    fast.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer = load_tokenizer(save_folder(fast, tmp_path / "both", eos_token="</s>"))
    assert (tokenizer.prefix_ids, tokenizer.suffix_ids) == ((1,), (2,)), (
        "the suffix is not added twice"
    )


def test_prefix_and_suffix_are_detected_without_a_latin_letter(tmp_path: Path) -> None:
    vocabulary = {"<s>": 0, "</s>": 1, "я": 2}
    fast = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    fast.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer = load_tokenizer(save_folder(fast, tmp_path))
    assert (tokenizer.prefix_ids, tokenizer.suffix_ids) == ((0,), (1,))


def test_truncation_and_padding_of_a_tokenizer_file_are_disabled(tmp_path: Path) -> None:
    """A tokenizer.json saved by a fine-tuning run often enables truncation, without any message."""
    fast = sentencepiece_like()
    fast.enable_truncation(max_length=4)
    fast.enable_padding(length=4)
    tokenizer = load_tokenizer(save_folder(fast, tmp_path, eos_token="</s>"))
    assert len(tokenizer.encode("abababab")) == 10
    assert [len(ids) for ids in tokenizer.encode_pieces(["abababab", "a"])] == [9, 2]


def test_unknown_text_gets_the_unknown_id(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_folder(sentencepiece_like(), tmp_path))
    assert tokenizer.unknown_id == 0
    assert tokenizer.encode("a?") == [1, 3, 4, 0]
    assert tokenizer.eos_id is None
    assert tokenizer.suffix_ids == ()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"special_tokens_map.json": {"eos_token": "</s>"}}, 2),
        ({"generation_config.json": {"eos_token_id": [2, 1]}}, 2),
        ({"config.json": {"eos_token_id": 2}}, 2),
        ({"tokenizer_config.json": {"eos_token": "<s>"}, "config.json": {"eos_token_id": 2}}, 1),
        ({"config.json": {"eos_token_id": 99}}, None),
    ],
)
def test_end_of_text_is_read_from_each_file_that_can_name_it(
    tmp_path: Path, files: dict[str, object], expected: int | None
) -> None:
    save_folder(sentencepiece_like(), tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert load_tokenizer(tmp_path).eos_id == expected


def test_a_split_is_safe_only_where_ids_stay_the_same(tmp_path: Path) -> None:
    assert BPE.is_split_safe("a word\n", "another")
    assert not BPE.is_split_safe("a wo", "rd")
    assert not BPE.is_split_safe("blank\n\n", "lines")
    # This tokenizer marks the start of every text with a space; two pieces would get two.
    assert not load_tokenizer(save_folder(sentencepiece_like(), tmp_path)).is_split_safe(
        "ab\n", "ab"
    )


@given(left=st.text("ab \n.'", max_size=12), right=st.text("ab \n.'", max_size=12))
@settings(max_examples=300, deadline=None)
def test_a_safe_split_changes_no_id(left: str, right: str) -> None:
    if BPE.is_split_safe(left, right):
        assert BPE.encode(left) + BPE.encode(right) == BPE.encode(left + right)


def test_gpt2_files_load_without_tokenizer_json(tmp_path: Path) -> None:
    BPE.save(tmp_path / "whole")
    model = json.loads((tmp_path / "whole" / "tokenizer.json").read_text())["model"]
    for prefix, folder in (("", tmp_path / "plain"), ("gpt2_", tmp_path / "prefixed")):
        folder.mkdir()
        (folder / f"{prefix}vocab.json").write_text(json.dumps(model["vocab"]))
        (folder / f"{prefix}merges.txt").write_text(
            "\n".join(" ".join(pair) for pair in model["merges"])
        )
        tokenizer = load_tokenizer(folder)
        assert tokenizer.encode(TEXTS[3]) == BPE.encode(TEXTS[3])
        assert tokenizer.eos_id == BPE.eos_id


def test_the_original_gpt2_files_load(outside_data: Path) -> None:
    tokenizer = load_tokenizer(outside_data / "tokenizers")
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (50257, 50256)
    assert tokenizer.encode("Hello world") == [15496, 995]
    assert tokenizer.decode([15496, 995, 50256]) == f"Hello world{END_OF_TEXT}"


def test_the_folder_of_a_trained_model_loads(outside_data: Path) -> None:
    tokenizer = load_tokenizer(outside_data / "models" / "babyllama105")
    assert (tokenizer.vocab_size, tokenizer.prefix_ids, tokenizer.suffix_ids) == (105, (1,), (2,))


def test_folders_without_a_valid_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"the folder has no tokenizer.*vocab\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{ damaged")
    with pytest.raises(TokenizerError, match="cannot be read"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(
        '{"version": "1.0", "model": {"type": "Unheard"}, "added_tokens": []}'
    )
    with pytest.raises(TokenizerError, match="cannot be read"):
        load_tokenizer(tmp_path)


def test_an_end_of_text_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"not in the vocabulary.*<\|nowhere\|>"):
        load_tokenizer(save_folder(sentencepiece_like(), tmp_path, eos_token="<|nowhere|>"))


def test_a_word_tokenizer_is_not_loaded_as_a_character_tokenizer(tmp_path: Path) -> None:
    CharacterTokenizer("ab").save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["vocab"] = {"a": 5, "b": 9}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("ab") == [5, 9]
    shutil.rmtree(tmp_path)
