"""Writing a Hugging Face folder: bytes, files, atomicity, refusals. tests/reference loads one in
transformers.
"""

from __future__ import annotations

import errno
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwright.architecture import ParameterSpec, ZerosInit, read_config
from shardwright.architecture.families import MODEL_FAMILIES
from shardwright.errors import CheckFailed, InputError, RunFailed, WeightsError
from shardwright.model.hf.exported_tensors import list_exported_tensors, plan_shards
from shardwright.model.hf.hf_folder import HF_CLASS_NAMES, write_hf_folder
from shardwright.model.hf.hf_weights import INDEX_FILE_NAME, WEIGHTS_FILE_NAME, WeightsFolder
from shardwright.model.weight_init import initialise_parameter

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "torch_dtype": "float16",
    "_name_or_path": "somewhere/else",
}
SHAPE = read_config(CONFIG)
SPECS = {spec.name: spec for spec in SHAPE.list_parameters()}


def read(name: str) -> torch.Tensor:
    return initialise_parameter(SPECS[name], 0, dtype=torch.float32)


def read_tree(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


class FakeTokenizer:
    """The part of a tokenizer that an export uses."""

    eos_id = 7
    prefix_ids = (5,)

    def save(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("max_shard_bytes", [1, 700, 1 << 30])
def test_written_tensors_are_bit_equal_when_read(
    tmp_path: Path, dtype: torch.dtype, max_shard_bytes: int
) -> None:
    """Read by the safetensors library and by our reader, from one file or several."""
    written = write_hf_folder(
        tmp_path / "out", SHAPE, read, dtype=dtype, max_shard_bytes=max_shard_bytes
    )
    stored: dict[str, torch.Tensor] = {}
    for file in written.weight_files:
        stored |= load_file(tmp_path / "out" / file)
    assert set(stored) == set(SPECS)
    weights = WeightsFolder(tmp_path / "out")
    weights.check(SHAPE)
    for name, tensor in stored.items():
        assert tensor.dtype == dtype
        assert torch.equal(tensor, read(name).to(dtype))
        assert torch.equal(weights.read(name, dtype=dtype), tensor)
    assert written.num_parameters == SHAPE.num_parameters
    assert written.weights_bytes == sum(tensor.nbytes for tensor in stored.values())


def test_the_header_equals_that_of_the_safetensors_library(tmp_path: Path) -> None:
    """The order of names may differ; metadata, dtypes and shapes are equal."""
    write_hf_folder(tmp_path / "out", SHAPE, read, dtype=torch.float32)
    save_file({name: read(name) for name in SPECS}, tmp_path / "library", metadata={"format": "pt"})

    def read_header(path: Path) -> dict[str, Any]:
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        assert length % 8 == 0
        return dict(json.loads(content[8 : 8 + length]))

    our_header = read_header(tmp_path / "out" / WEIGHTS_FILE_NAME)
    library_header = read_header(tmp_path / "library")
    assert our_header.pop("__metadata__") == library_header.pop("__metadata__") == {"format": "pt"}
    assert {name: (entry["dtype"], entry["shape"]) for name, entry in our_header.items()} == {
        name: (entry["dtype"], entry["shape"]) for name, entry in library_header.items()
    }


def test_index_covers_every_tensor(tmp_path: Path) -> None:
    out = tmp_path / "out"
    written = write_hf_folder(out, SHAPE, read, dtype=torch.float32, max_shard_bytes=1000)
    index = json.loads((out / INDEX_FILE_NAME).read_text())
    assert set(index["weight_map"]) == set(SPECS)
    assert set(index["weight_map"].values()) == set(written.weight_files)
    assert index["metadata"]["total_size"] == 4 * SHAPE.num_parameters
    count = len(written.weight_files)
    assert written.weight_files == tuple(
        f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)
    )
    for file in written.weight_files:
        tensors = load_file(out / file)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 1000 or len(tensors) == 1


def test_plan_shards_keeps_order_and_limit() -> None:
    specs = [
        ParameterSpec(str(i), (size,), "up", 0, ZerosInit())
        for i, size in enumerate([3, 3, 5, 20, 1, 1])
    ]
    tensors = list_exported_tensors(specs, torch.bfloat16)
    shards = [
        [tensor.piece.name for tensor in shard]
        for shard in plan_shards(tensors, max_shard_bytes=12)
    ]
    assert shards == [["0", "1"], ["2"], ["3"], ["4", "5"]]


def test_config_describes_the_folder(tmp_path: Path) -> None:
    write_hf_folder(tmp_path / "out", SHAPE, read, dtype=torch.bfloat16)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert not {"torch_dtype", "_name_or_path"} & set(config)
    assert read_config(config) == SHAPE


def test_special_ids_come_from_the_tokenizer_if_the_config_has_none(tmp_path: Path) -> None:
    write_hf_folder(tmp_path / "without_ids", SHAPE, read, tokenizer=FakeTokenizer())
    config = json.loads((tmp_path / "without_ids" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (5, 7, None)
    assert json.loads((tmp_path / "without_ids" / "generation_config.json").read_text()) == {
        "bos_token_id": 5,
        "eos_token_id": 7,
    }
    assert (tmp_path / "without_ids" / "tokenizer.json").exists()
    with_ids = read_config(CONFIG | {"eos_token_id": [1, 2]})
    write_hf_folder(
        tmp_path / "with_ids",
        with_ids,
        read,
        tokenizer=FakeTokenizer(),
        generation_config={"eos_token_id": 3},
    )
    assert json.loads((tmp_path / "with_ids" / "config.json").read_text())["eos_token_id"] == [1, 2]
    assert json.loads((tmp_path / "with_ids" / "generation_config.json").read_text()) == {
        "eos_token_id": 3
    }


def test_every_family_has_a_class_name() -> None:
    assert set(HF_CLASS_NAMES) == set(MODEL_FAMILIES)


def test_a_folder_with_files_is_not_changed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    write_hf_folder(out, SHAPE, read)  # empty: fine
    (out / "notes.txt").write_text("mine")
    before = read_tree(out)
    with pytest.raises(InputError, match="the folder is not empty"):
        write_hf_folder(out, SHAPE, read)
    assert read_tree(out) == before
    write_hf_folder(out, SHAPE, read, overwrite=True)
    assert not (out / "notes.txt").exists()
    assert sorted(tmp_path.iterdir()) == [out]


def test_a_file_at_the_path_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(InputError, match="this is a file"):
        write_hf_folder(tmp_path / "out", SHAPE, read, overwrite=True)


def test_a_failed_write_leaves_the_old_folder_and_no_other_files(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_hf_folder(out, SHAPE, read)
    before = read_tree(out)

    def raise_no_space(name: str) -> torch.Tensor:
        if name == "model.norm.weight":
            raise OSError(errno.ENOSPC, "No space left on device")
        return read(name)

    with pytest.raises(RunFailed, match="No space left on device"):
        write_hf_folder(out, SHAPE, raise_no_space, overwrite=True)
    assert read_tree(out) == before
    assert sorted(tmp_path.iterdir()) == [out]


def test_a_failed_rename_restores_the_old_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    write_hf_folder(out, SHAPE, read)
    before = read_tree(out)
    rename = Path.rename

    def fail_for_partial(self: Path, target: Path) -> Path:
        if ".partial-" in self.name:
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_for_partial)
    with pytest.raises(RunFailed, match="Input/output error"):
        write_hf_folder(out, SHAPE, read, dtype=torch.float32, overwrite=True)
    assert read_tree(out) == before
    assert sorted(tmp_path.iterdir()) == [out]


def test_a_failed_check_leaves_no_files(tmp_path: Path) -> None:
    listings: list[set[str]] = []

    def refuse(folder: Path) -> None:
        listings.append({file.name for file in folder.iterdir()})
        raise CheckFailed("no")

    with pytest.raises(CheckFailed):
        write_hf_folder(tmp_path / "out", SHAPE, read, check=refuse)
    assert listings == [{WEIGHTS_FILE_NAME, "config.json", "generation_config.json"}]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        (1e5, torch.float16, "too large"),
        (float("nan"), torch.float32, "not finite"),
        (float("inf"), torch.bfloat16, "not finite"),
    ],
)
def test_values_outside_the_dtype_are_refused(
    tmp_path: Path, value: float, dtype: torch.dtype, message: str
) -> None:
    def read_with_bad_norm(name: str) -> torch.Tensor:
        return read(name).fill_(value) if name == "model.norm.weight" else read(name)

    with pytest.raises(WeightsError, match=rf"model\.norm\.weight.*{message}"):
        write_hf_folder(tmp_path / "out", SHAPE, read_with_bad_norm, dtype=dtype)
    assert not list(tmp_path.iterdir())


def test_wrong_shape_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"lm_head\.weight.*got \[8, 11\]; allowed: \[11, 8\]"):
        write_hf_folder(
            tmp_path / "out",
            SHAPE,
            lambda name: read(name).T if name == "lm_head.weight" else read(name),
        )


def test_integer_dtypes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="float32, bfloat16"):
        write_hf_folder(tmp_path / "out", SHAPE, read, dtype=torch.int8)


def test_tensors_are_written_one_at_a_time(tmp_path: Path) -> None:
    """Every tensor is freed before the next one is read."""
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def read_and_track(name: str) -> torch.Tensor:
        assert not alive, "an earlier tensor is still alive"
        tensor = read(name)
        alive.add(tensor)
        return tensor

    write_hf_folder(tmp_path / "out", SHAPE, read_and_track, dtype=torch.float32)
    write_hf_folder(tmp_path / "cast", SHAPE, read_and_track, dtype=torch.bfloat16)
