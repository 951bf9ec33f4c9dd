"""Sources in the formats of other libraries: MosaicML's MDS and WebDataset's tar files."""

from __future__ import annotations

import importlib
import io
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwright.data.preparation import prepare_data
from shardwright.errors import DataError
from tests.unit.data.recipes import build_recipe, story
from tests.unit.data.test_streaming import build_streamed

TEXTS = [story(number) for number in range(40)]


def need(package: str, distribution: str) -> Any:
    """Import a package, or skip the test by the package's name."""
    try:
        return importlib.import_module(package)
    except (ImportError, RuntimeError) as error:  # torchvision of another torch: RuntimeError
        pytest.skip(f"needs {distribution}: {error}")


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def decode_all(data: Any) -> str:
    samples = [data.train.get_sample(index) for index in range(len(data.train))]
    return "".join(data.tokenizer.decode(sample.input_ids.tolist()) for sample in samples)


def test_text_members_of_tar_files_are_documents(tmp_path: Path) -> None:
    need("webdataset", "webdataset")
    for shard in range(2):
        members = {}
        for number in range(shard, len(TEXTS), 2):
            members[f"sample{number:03}.txt"] = TEXTS[number].encode()
            members[f"sample{number:03}.png"] = b"\x89PNG"  # ignored
        write_tar(tmp_path / "set" / f"{shard:05}.tar", members)
    (tmp_path / "set" / "readme.md").write_text("not data")
    source = {"path": str(tmp_path / "set"), "format": "webdataset"}
    data = prepare_data(build_recipe(tmp_path, source))
    assert data.report.num_files == 2
    assert data.report.train.counts.num_documents == len(TEXTS)
    assert data.report.train.counts.num_characters == sum(map(len, TEXTS))
    streamed = prepare_data(build_streamed(tmp_path, source, 100_000))
    assert streamed.report.train.counts.num_documents == len(TEXTS)
    assert TEXTS[20][:20] in decode_all(streamed)


def test_json_members_of_tar_files_are_records(tmp_path: Path) -> None:
    need("webdataset", "webdataset")
    members = {f"{n}.json": json.dumps({"input_ids": [n, n + 1, n + 2]}).encode() for n in range(5)}
    members["5.json"] = b"{"
    members["6.jpg"] = b"\xff\xd8"
    path = write_tar(tmp_path / "a.tar", members)
    recipe = build_recipe(
        tmp_path,
        {"path": str(path), "format": "webdataset"},
        tokenizer={"kind": "huggingface"},
        max_broken_fraction=0.5,
    )
    data = prepare_data(recipe, 100)
    assert data.report.train.counts.num_tokens == 15
    reasons = [broken.reason for broken in data.report.records.broken]
    assert len(reasons) == 2
    assert reasons[0].startswith("5.json is not JSON")
    assert reasons[1] == "6 has no .json or .txt member, only jpg"


def test_a_truncated_tar_file_is_an_error(tmp_path: Path) -> None:
    need("webdataset", "webdataset")
    path = write_tar(tmp_path / "a.tar", {f"{n}.txt": b"x" * 5000 for n in range(4)})
    path.write_bytes(path.read_bytes()[:12_000])
    with pytest.raises(DataError, match="the file is damaged"):
        prepare_data(build_recipe(tmp_path, {"path": str(path), "format": "webdataset"}))


def write_mds(
    folder: Path,
    columns: dict[str, str],
    samples: list[dict[str, Any]],
    compression: str | None = None,
) -> Path:
    writer = need("streaming", "mosaicml-streaming").MDSWriter
    settings = {"columns": columns, "size_limit": 2_000, "compression": compression}
    with writer(out=str(folder), **settings) as output:
        for sample in samples:
            output.write(sample)
    return folder


def test_texts_of_mds_shards_are_documents(tmp_path: Path) -> None:
    folder = write_mds(tmp_path / "set", {"text": "str"}, [{"text": text} for text in TEXTS])
    assert len(list(folder.glob("*.mds"))) > 1
    source = {"path": str(folder), "format": "mds"}
    data = prepare_data(build_recipe(tmp_path, source))
    assert data.report.train.counts.num_documents == len(TEXTS)
    assert data.report.train.counts.num_characters == sum(map(len, TEXTS))
    streamed = prepare_data(build_streamed(tmp_path, source, 100_000))
    assert streamed.report.train.counts.num_documents == len(TEXTS)


@pytest.mark.parametrize("compression", ["zstd", "zstd:7", "gz", "bz2", "br", "snappy"])
def test_compressed_mds_shards_have_the_samples_of_uncompressed_ones(
    tmp_path: Path, compression: str
) -> None:
    samples = [{"text": text} for text in TEXTS]
    folder = write_mds(tmp_path / "set", {"text": "str"}, samples, compression)
    shards = list(folder.glob(f"*.mds.{compression.partition(':')[0]}"))
    assert len(shards) > 1
    assert not list(folder.glob("*.mds"))
    plain = write_mds(tmp_path / "plain", {"text": "str"}, samples)
    source = {"path": str(folder), "format": "mds"}
    expected = prepare_data(build_recipe(tmp_path, {"path": str(plain), "format": "mds"}))
    data = prepare_data(build_recipe(tmp_path, source))
    assert data.report.train.counts.num_documents == len(TEXTS)
    assert decode_all(data) == decode_all(expected)
    streamed = prepare_data(build_streamed(tmp_path, source, 100_000))
    assert streamed.report.train.counts.num_documents == len(TEXTS)
    one = prepare_data(build_recipe(tmp_path, {"path": str(min(shards)), "format": "mds"}))
    assert 0 < one.report.train.counts.num_documents < len(TEXTS)


@pytest.mark.parametrize("damage", ["truncated", "another format", "changed"])
def test_a_damaged_compressed_mds_shard_is_an_error(tmp_path: Path, damage: str) -> None:
    samples = [{"text": text} for text in TEXTS]
    shard = min(write_mds(tmp_path, {"text": "str"}, samples, "gz").glob("*.mds.gz"))
    content = shard.read_bytes()
    shard.write_bytes(
        {
            "truncated": content[:-20],
            "another format": b"not compressed",
            "changed": content[:90] + bytes([content[90] ^ 1]) + content[91:],
        }[damage]
    )
    with pytest.raises(DataError, match="the file is damaged"):
        prepare_data(build_recipe(tmp_path, {"path": str(shard), "format": "mds"}))


def test_a_shard_that_is_there_twice_is_an_error(tmp_path: Path) -> None:
    samples = [{"text": text} for text in TEXTS]
    folder = write_mds(tmp_path / "set", {"text": "str"}, samples, "zstd")
    write_mds(folder / "raw", {"text": "str"}, samples)
    for shard in (folder / "raw").glob("*.mds"):
        shard.rename(folder / shard.name)
    source = {"path": str(folder), "format": "mds"}
    with pytest.raises(DataError, match=r"a shard twice.*shard\.00000\.mds and .*\.mds\.zstd"):
        prepare_data(build_recipe(tmp_path, source))
    with pytest.raises(DataError, match="a shard twice"):
        prepare_data(build_streamed(tmp_path, source, 100_000))
    data = prepare_data(build_recipe(tmp_path, source | {"exclude": ["*.zstd"]}))
    assert data.report.train.counts.num_documents == len(TEXTS)


def test_token_ids_of_mds_shards_are_read_as_they_are(tmp_path: Path) -> None:
    samples = [{"tokens": np.arange(n, n + 9, dtype=np.uint32)} for n in range(30)]
    folder = write_mds(tmp_path / "set", {"tokens": "ndarray:uint32"}, samples)
    source = {"path": str(folder), "format": "mds", "columns": {"input_ids": "tokens"}}
    recipe = build_recipe(tmp_path, source, tokenizer={"kind": "huggingface"}, packing="none")
    data = prepare_data(recipe, 100)
    for number in range(30):
        sample = data.train.get_sample(number)
        assert sample.input_ids.tolist() == list(range(number, number + 8))
        assert sample.labels.tolist() == list(range(number + 1, number + 9))


def test_pickled_columns_and_damaged_mds_shards_are_refused(tmp_path: Path) -> None:
    folder = write_mds(tmp_path / "a", {"text": "pkl"}, [{"text": "a"}])
    with pytest.raises(DataError, match="pickled objects"):
        prepare_data(build_recipe(tmp_path, {"path": str(folder), "format": "mds"}))
    folder = write_mds(tmp_path / "b", {"text": "str"}, [{"text": text} for text in TEXTS])
    shard = min(folder.glob("*.mds"))
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(DataError, match="the file is damaged"):
        prepare_data(build_recipe(tmp_path, {"path": str(folder), "format": "mds"}))


@pytest.mark.parametrize(
    ("name", "file_format", "package"),
    [("a.mds", "mds", "mosaicml-streaming"), ("a.tar", "webdataset", "webdataset")],
)
def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, file_format: str, package: str
) -> None:
    for module in ("streaming", "webdataset", "webdataset.tariterators"):
        monkeypatch.setitem(sys.modules, module, None)
    for module in [name for name in sys.modules if name.startswith("streaming.")]:
        monkeypatch.delitem(sys.modules, module)
    path = write_tar(tmp_path / name, {"a.txt": b"text"})
    with pytest.raises(DataError, match=rf"needs the package {package}.*shardwright\["):
        prepare_data(build_recipe(tmp_path, {"path": str(path), "format": file_format}))


def test_the_format_is_named_for_files_of_other_libraries(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", {"a.txt": b"text"})
    with pytest.raises(DataError, match="format: webdataset"):
        prepare_data(build_recipe(tmp_path, str(path)))
    compressed = tmp_path / "a.mds.zstd"
    compressed.write_bytes(b"")
    with pytest.raises(DataError, match="Set `format: mds`"):
        prepare_data(build_recipe(tmp_path, str(compressed)))
    unknown = tmp_path / "a.mds.xz"
    unknown.write_bytes(b"")
    with pytest.raises(DataError, match=r"not have a suffix of `format: mds`.*\.mds\.zstd"):
        prepare_data(build_recipe(tmp_path, {"path": str(unknown), "format": "mds"}))
