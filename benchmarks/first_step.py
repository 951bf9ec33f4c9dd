"""Time to the first step from a cold start: python -m benchmarks.first_step.

Two CPU ranks are started as users start them; the time is that from the command to the end of the
first step. For more ranks than a machine has, one rank runs the code of the set-up in a process
group without peers: it makes all groups, its part of the model and its optimizer. As many clients
as ranks then claim their rank in a real rendezvous store. What is not simulated: connections
between ranks, other machines, storage. torch looks up the name of each client's address, so a name
server that does not answer is measured too; `unshare --net` (with `ip link set lo up`) has none.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.conditions import read_conditions
from benchmarks.restarts import SETTINGS, start_run, wait_for_step

SIMULATED = ((2, "dp_shard=2"), (64, "dp_shard=8,tp=8"), (512, "dp_replicate=8,dp_shard=8,tp=8"))
MODEL = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128,
}
"""Model whose set-up is simulated: as many layers and parameters by name as one of 8 billion."""


def measure_cold_start() -> float:
    """Return the seconds from the command to the end of the first step of two ranks."""
    with tempfile.TemporaryDirectory() as name, open(Path(name) / "errors", "wb") as errors:
        folder = Path(name)
        started = time.time()
        launcher = start_run(folder, 0, errors, {}, save_every_steps=1000)
        try:
            return wait_for_step(launcher, folder / "run", since_seconds=0.0) - started
        finally:
            launcher.kill()
            launcher.wait()


def simulate_setup(num_ranks: int, layout: str) -> dict[str, float]:
    """Return the seconds of each part of the set-up of rank 0 of so many ranks."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from shardwright.config.recipe_loading import parse_layout, validate_recipe
    from shardwright.training.checks.run_checks import validate_run
    from shardwright.training.setup import build_state

    seconds = {}
    with tempfile.TemporaryDirectory() as name:
        corpus = Path(name) / "corpus.txt"
        lines = (f"{a} + {a} = {2 * a}\n" for a in range(20000))
        corpus.write_text(string.ascii_letters + "".join(lines))
        data = {"sources": str(corpus), "cache_dir": str(Path(name) / "cache")}
        batch = {"global_batch_size": num_ranks, "gradient_accumulation_steps": 1}
        document: dict[str, Any] = SETTINGS | {
            "model": {"config": MODEL},
            "data": data,
            "layout": parse_layout(layout) | {"zero_stage": 3},
            "training": SETTINGS["training"] | batch,
        }
        recipe = validate_recipe(document)
        validate_run(recipe, num_ranks)  # makes the data cache, which a restart finds
        dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
        started = time.perf_counter()
        validated = validate_run(recipe, num_ranks)
        seconds["checks and data"] = time.perf_counter() - started
        started = time.perf_counter()
        build_state(validated, torch.device("cpu"))
        seconds["groups, model, optimizer"] = time.perf_counter() - started
        dist.destroy_process_group()
    started = time.perf_counter()
    claim_ranks(num_ranks)
    seconds["claims in the store"] = time.perf_counter() - started
    return seconds


def claim_ranks(num_ranks: int) -> None:
    """Let one client per rank claim its rank in a store, as ranks do, and wait for all others."""
    import torch.distributed as dist

    from shardwright.launch.rank_claim import claim_rank
    from shardwright.launch.rank_environment import RankEnvironment

    # Both ends of every connection are in this process.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    timeout = timedelta(seconds=120)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(server.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }

    def claim(rank: int) -> None:
        store = claim_rank(RankEnvironment(rank, num_ranks, 0), timeout)
        if store.add("joined", 1) == num_ranks:
            store.set("all", "1")
        store.wait(["all"])

    with ThreadPoolExecutor(num_ranks) as pool:
        for _ in pool.map(claim, range(num_ranks)):
            pass


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print; `--simulate` simulates the set-up of one number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--simulate", nargs=2, metavar=("RANKS", "LAYOUT"))
    options = parser.parse_args(arguments)
    if options.simulate:
        seconds = simulate_setup(int(options.simulate[0]), options.simulate[1])
        parts = ", ".join(f"{name} {value:.2f} s" for name, value in seconds.items())
        sys.stdout.write(f"{parts}; in all {sum(seconds.values()):.2f} s\n")
        return
    load = os.getloadavg()[0]
    starts = sorted(measure_cold_start() for _ in range(options.starts))
    lines = [
        f"two ranks, cold start to the end of step 1: {statistics.median(starts):.1f} s "
        f"({starts[0]:.1f} to {starts[-1]:.1f} s of {len(starts)})"
    ]
    for num_ranks, layout in SIMULATED:
        words = [sys.executable, "-m", "benchmarks.first_step", "--simulate"]
        environment = os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR"}
        done = subprocess.run(
            [*words, str(num_ranks), layout],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env=environment,
        )
        lines.append(f"set-up of rank 0 of {num_ranks}, {layout}: {done.stdout.strip()}")
    lines.append(f"load average {load:.1f} to {os.getloadavg()[0]:.1f}; {read_conditions()}")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
