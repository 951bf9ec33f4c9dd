"""`shardwright.launch.node_ranks` whose ranks pause before each step."""

from __future__ import annotations

import sys

from shardwright.launch import node_ranks

if __name__ == "__main__":
    ranks, words = node_ranks.parse_arguments(sys.argv[1:])
    command = [sys.executable, "-m", "tests.slurm.slow_rank", *words]
    sys.exit(node_ranks.run_node_ranks(ranks, command))
