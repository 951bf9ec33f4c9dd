"""What is started, wherever it is started: nodes, ranks, the words of `train`, and the environment that its links need."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shardwright.config import Recipe
from shardwright.errors import InputError
from shardwright.plan import resolve_degrees

_PLACEHOLDER = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")


@dataclass(frozen=True)
class Links:
    """How the ranks reach each other: the network interface that names the nodes' addresses, and the InfiniBand adapters."""

    interface: str | None = None
    infiniband_adapters: str | None = None
    infiniband: bool = True

    def environment(self) -> dict[str, str]:
        """Variables of NCCL and gloo; nothing is set that was not asked for, since both look for themselves.

        >>> Links(interface="eth0", infiniband=False).environment()
        {'GLOO_SOCKET_IFNAME': 'eth0', 'NCCL_SOCKET_IFNAME': 'eth0', 'NCCL_IB_DISABLE': '1'}
        """
        found: dict[str, str] = {}
        if self.interface is not None:
            found |= {"GLOO_SOCKET_IFNAME": self.interface, "NCCL_SOCKET_IFNAME": self.interface}
        if self.infiniband_adapters is not None:
            found["NCCL_IB_HCA"] = self.infiniband_adapters
        if not self.infiniband:
            found["NCCL_IB_DISABLE"] = "1"
        return found


@dataclass(frozen=True)
class Job:
    """A recipe on `num_nodes` machines with `ranks_per_node` ranks each; one accelerator a rank, unless `device` is the CPU."""

    recipe: Recipe
    recipe_path: str
    num_nodes: int
    ranks_per_node: int
    overrides: tuple[str, ...] = ()
    layout: str | None = None
    run_dir: str | None = None
    links: Links = Links()
    environment: Mapping[str, str] = field(default_factory=dict)
    save_seconds: int = 300
    """How long before the end ranks are asked to save: a step and a checkpoint must fit in."""
    cores_per_rank: int | None = None
    port: int | None = None

    def __post_init__(self) -> None:
        """Refuse degrees and batches that do not fit the ranks, before anything waits in a queue for them."""
        if self.links.infiniband_adapters is not None and not self.links.infiniband:
            raise InputError(
                "adapters are named, and InfiniBand is turned off",
                field="--ib-hca",
                got=self.links.infiniband_adapters,
                remedy="Leave out one of --ib-hca and --no-infiniband",
            )
        if not self.recipe.layout.auto:
            resolve_degrees(self.recipe, self.world_size)

    @property
    def world_size(self) -> int:
        """Ranks of all nodes."""
        return self.num_nodes * self.ranks_per_node

    @property
    def on_accelerators(self) -> bool:
        """Whether each rank wants a device of its own; `run.device: auto` takes one where it is, so one is asked for."""
        return self.recipe.run.device != "cpu"

    @property
    def max_restarts(self) -> int:
        """How often a lost rank or node is made up for; `elastic.max_restarts`, taken over by what starts the ranks."""
        return self.recipe.elastic.max_restarts

    def train_words(self) -> list[str]:
        """`train RECIPE` and its options, without how it goes on."""
        words = ["train", self.recipe_path]
        for override in self.overrides:
            words += ["--set", override]
        if self.layout is not None:
            words += ["--layout", self.layout]
        if self.run_dir is not None:
            words += ["--run-dir", self.run_dir]
        return words

    def variables(self) -> dict[str, str]:
        """All that is exported on every node, by name; what was given by hand goes last and wins."""
        threads = str(self.cores_per_rank or 1)
        loud = {"NCCL_DEBUG": "WARN"} if self.on_accelerators else {}
        return {"OMP_NUM_THREADS": threads, **loud, **self.links.environment(), **self.environment}

    def cautions(self) -> list[str]:
        """What of the recipe means something else, or nothing, under a launcher."""
        told = []
        if self.recipe.elastic.min_ranks is not None:
            told.append("elastic.min_ranks is for ranks of one machine: every restart here takes all nodes")
        if self.num_nodes > 1 and not self.max_restarts:
            told.append("elastic.max_restarts is 0: a lost rank or node ends the run, and is not made up for")
        if self.num_nodes > 1 and self.links.interface is None and not self.on_accelerators:
            told.append("gloo takes the address that the host's name stands for; where that is 127.0.x.1 name an --interface")
        return told


def parse_environment(given: Iterable[str]) -> dict[str, str]:
    """`NAME=VALUE` words as a mapping.

    >>> parse_environment(["HF_HOME=/scratch/hf"])
    {'HF_HOME': '/scratch/hf'}
    """
    found = {}
    for word in given:
        name, equals, value = word.partition("=")
        if not equals or not _NAME.match(name):
            raise InputError("not an environment variable", field="--env", got=word, allowed="NAME=VALUE")
        found[name] = value
    return found


def placeholders(text: str) -> set[str]:
    """Names of the environment variables that a recipe reads.

    >>> sorted(placeholders("sources: ${DATA}/text"))
    ['DATA']
    """
    return set(_PLACEHOLDER.findall(text))


def exports(variables: Mapping[str, str]) -> list[str]:
    """A line of shell for each variable."""
    return [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
