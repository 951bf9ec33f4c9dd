"""Parallel execution of one decoder: mesh, order of parallelisms, gradient reduction."""

from shardwright.parallel.apply import apply_layout
from shardwright.parallel.mesh import build_mesh, init_process_group
from shardwright.parallel.parallel_model import ParallelModel
