"""How one decoder runs on many ranks: the mesh, the cuts and their order, the sums."""

from shardwright.parallel.apply import ParallelModel, apply_layout
from shardwright.parallel.mesh import build_mesh, init_process_group

__all__ = ["ParallelModel", "apply_layout", "build_mesh", "init_process_group"]
