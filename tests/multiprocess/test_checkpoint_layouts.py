"""A checkpoint written under one layout loads under any other, bit-equal: all ordered pairs of
layouts.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from shardwright.checkpoint import part_exchange
from shardwright.checkpoint.manifest import read_manifest
from shardwright.checkpoint.storage_path import RemotePath
from shardwright.checkpoint.tensor_loading import load_checkpoint
from shardwright.checkpoint.tensor_saving import save_checkpoint
from tests.multiprocess.pool import RankPool

SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "embedding": ((50, 12), torch.float32),
    "odd": ((7, 5), torch.bfloat16),
    "short": ((2, 9), torch.float64),  # fewer rows than ranks: some shards are empty
    "norm": ((13,), torch.float32),
    "stack": ((3, 4, 6), torch.float16),
    "count": ((), torch.int64),
    "mask": ((5,), torch.bool),
    "empty": ((0, 4), torch.float32),
}

# ranks, mesh shape, placements per mesh axis; None is plain tensors. A placement on a dim that a
# tensor lacks is Replicate there.
LAYOUTS: dict[str, tuple[int, tuple[int, ...], tuple[Placement, ...] | None]] = {
    "one": (1, (), None),
    "plain2": (2, (), None),
    "rows2": (2, (2,), (Shard(0),)),
    "rows3": (3, (3,), (Shard(0),)),
    "columns2": (2, (2,), (Shard(1),)),
    "hybrid4": (4, (2, 2), (Replicate(), Shard(0))),
    "rows4": (4, (4,), (Shard(0),)),
    "rows_columns4": (4, (2, 2), (Shard(0), Shard(1))),
    "strided4": (4, (2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    "strided_columns4": (4, (2, 2), (_StridedShard(0, split_factor=3), Shard(1))),
}


def build_value(name: str) -> torch.Tensor:
    """Return the same tensor on every rank of every layout."""
    shape, dtype = SHAPES[name]
    generator = torch.Generator().manual_seed(sorted(SHAPES).index(name))
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 100).to(dtype)


@cache
def get_mesh(shape: tuple[int, ...]) -> DeviceMesh:
    """Return one mesh per shape and worker, because groups use threads and sockets until the
    process ends.
    """
    return init_device_mesh("cpu", shape)


def distribute_tensors(layout: str, *, blank: bool) -> dict[str, torch.Tensor]:
    """Return every tensor under a layout, with its values or with zeros."""
    _, mesh_shape, placements = LAYOUTS[layout]
    tensors = {
        name: torch.zeros_like(build_value(name)) if blank else build_value(name) for name in SHAPES
    }
    if placements is None:
        return tensors
    mesh = get_mesh(mesh_shape)
    result: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        fitted = [
            p if isinstance(p, Replicate) or p.dim < tensor.dim() else Replicate()
            for p in placements
        ]
        # Sharded locally, which uneven strided shards need.
        result[name] = distribute_tensor(tensor, mesh, fitted, src_data_rank=None)
    return result


def read_local_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of this rank's part."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.contiguous().view(-1).view(torch.uint8)


def save_under(root: str, layout: str) -> None:
    saved = save_checkpoint(
        root, 7, distribute_tensors(layout, blank=False), {"layout": layout, "cursor": 2**60}
    )
    assert saved.path.is_dir()


def load_under(root: str, layout: str, written_by: str) -> None:
    """Load from a folder, and from the same folder as from a store, in rounds of few bytes."""
    expected = distribute_tensors(layout, blank=False)
    folder = Path(root) / "step-00000007"
    for path in (folder, RemotePath(str(folder), LocalFileSystem())):
        tensors = distribute_tensors(layout, blank=True)
        with (
            patch.object(part_exchange, "SHORT_RUN_BYTES", 64),
            patch.object(part_exchange, "_ROUND_BYTES", 64),
        ):
            values = load_checkpoint(path, tensors)
        assert values == {"layout": written_by, "cursor": 2**60}
        for name, tensor in tensors.items():
            assert torch.equal(read_local_bytes(tensor), read_local_bytes(expected[name])), name


@pytest.fixture(scope="module")
def written(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a folder of checkpoints by layout."""
    roots = {layout: tmp_path_factory.mktemp(layout) for layout in LAYOUTS}
    for layout, root in roots.items():
        ranks.run(LAYOUTS[layout][0], save_under, str(root), layout)
    return roots


@pytest.mark.parametrize("reading", LAYOUTS)
@pytest.mark.parametrize("writing", LAYOUTS)
def test_any_layout_loads_under_any_other(
    ranks: RankPool, written: dict[str, Path], writing: str, reading: str
) -> None:
    ranks.run(LAYOUTS[reading][0], load_under, str(written[writing]), reading, writing)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_replicas_are_written_once_and_ranks_share_the_work(
    written: dict[str, Path], layout: str
) -> None:
    folder = written[layout] / "step-00000007"
    manifest = read_manifest(folder)
    data_bytes = sum(
        build_value(name).numel() * build_value(name).element_size() for name in SHAPES
    )
    header_bytes = sum(
        8 + int.from_bytes(path.read_bytes()[:8], "little") for path in folder.glob("*.safetensors")
    )
    assert (
        sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        == data_bytes + header_bytes
    )
    num_ranks = LAYOUTS[layout][0]
    assert len(list(folder.glob("*.safetensors"))) == num_ranks
    # 3,018 bytes in all; the largest tensor of one writer is a part of the embedding.
    sizes = {
        path.name: path.stat().st_size - 8 - int.from_bytes(path.read_bytes()[:8], "little")
        for path in folder.glob("*.safetensors")
    }
    largest = max(entry.box.num_elements * 4 for entry in manifest.tensors["embedding"].slices)
    assert max(sizes.values()) <= max(data_bytes / num_ranks * 1.3, largest)


def save_pipeline(root: str) -> None:
    """Save tensors of different names on each rank, and one of the same name."""
    rank = dist.get_rank()
    save_checkpoint(
        root, 1, {f"stage{rank}": torch.full((4,), float(rank)), "shared": torch.arange(6)}, {}
    )


def load_swapped_pipeline(root: str) -> None:
    rank = dist.get_rank()
    tensors = {f"stage{1 - rank}": torch.zeros(4), "shared": torch.zeros(6, dtype=torch.int64)}
    load_checkpoint(Path(root) / "step-00000001", tensors)
    assert torch.equal(tensors[f"stage{1 - rank}"], torch.full((4,), float(1 - rank)))
    assert torch.equal(tensors["shared"], torch.arange(6))


def test_ranks_may_name_different_tensors(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, save_pipeline, str(tmp_path))
    ranks.run(2, load_swapped_pipeline, str(tmp_path))


def check_boxes_against_torch() -> None:
    """Compare our boxes with torch's shards, element by element."""
    from shardwright.checkpoint.local_tensors import describe_local_tensor

    mesh = get_mesh((2, 2))
    cases = [
        (Shard(0), Shard(0)),
        (Shard(1), Shard(0)),
        (Shard(0), Replicate()),
        (_StridedShard(0, split_factor=2), Shard(0)),
        (_StridedShard(0, split_factor=3), Replicate()),
        (_StridedShard(1, split_factor=2), Shard(0)),
        (_StridedShard(0, split_factor=2), _StridedShard(1, split_factor=2)),
    ]
    for placements in cases:
        for shape in ((8, 8), (7, 5), (3, 9), (1, 4), (13, 2)):
            whole = torch.arange(shape[0] * shape[1]).view(shape)
            tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            pieces = describe_local_tensor("x", tensor).slices
            assert sum(piece.box.num_elements for piece in pieces) == tensor.to_local().numel()
            for piece in pieces:
                rows, columns = (
                    slice(a, a + n)
                    for a, n in zip(piece.box.offsets, piece.box.lengths, strict=True)
                )
                assert torch.equal(whole[rows, columns], piece.values), (
                    placements,
                    shape,
                    piece.box,
                )


def test_boxes_equal_the_shards_of_torch(ranks: RankPool) -> None:
    ranks.run(4, check_boxes_against_torch)
