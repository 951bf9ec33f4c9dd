"""Values that describe a cluster: its accelerators, links and nodes. Torch-free.

Base units: bytes, seconds, FLOP/s of dense products. The rate of a link is what one accelerator
can send in one direction while it receives the same: half of the bidirectional rate in data
sheets, per GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from shardwright.errors import InputError

if TYPE_CHECKING:
    from shardwright.hardware.measured_profile import MeasuredProfile

MAX_GPUS = 262_144
"""Maximum number of accelerators in a cluster; a search over more would take minutes."""

AcceleratorKind = Literal["gpu", "cpu"]
LinkKind = Literal["nvlink", "infinity_fabric", "pcie", "infiniband", "ethernet", "shared_memory"]


@dataclass(frozen=True)
class Accelerator:
    """One GPU (or the cores of one CPU socket), with its published ratings.

    `memory_bytes` is the memory available to a process, a little less than the nominal
    gigabytes. `peak_flops_per_second` maps a precision (fp64, fp32, tf32, bf16, fp16, fp8, fp4)
    to the rate of dense products; absent precisions have no hardware support. `sources` cites
    the origin of each number.
    """

    name: str
    memory_bytes: int
    memory_bytes_per_second: float
    peak_flops_per_second: Mapping[str, float] = field(hash=False)
    kind: AcceleratorKind = "gpu"
    vendor: str = "NVIDIA"
    generation: str = ""
    power_watts: float | None = None
    sustained_flops_per_second: Mapping[str, float] = field(default_factory=dict, hash=False)
    """FLOP/s of the largest products by precision, where the vendor or a public benchmark
    measured it."""
    sources: Mapping[str, str] = field(default_factory=dict, hash=False, compare=False, repr=False)

    @property
    def has_bf16_units(self) -> bool:
        """True if the device multiplies bf16 faster than fp32."""
        peaks = self.peak_flops_per_second
        return peaks.get("bf16", 0.0) > peaks.get("fp32", 0.0)

    def get_peak_flops_per_second(self, precision: str) -> float:
        """Return the dense peak of `precision` in FLOP/s.

        Raises:
            InputError: the device does not support it; lists the precisions that it supports.
        """
        if precision not in self.peak_flops_per_second:
            raise InputError(
                f"{self.name} has no hardware support for {precision}",
                field="precision",
                got=precision,
                allowed=", ".join(self.peak_flops_per_second),
                remedy="Use one of these precisions, or another accelerator",
            )
        return self.peak_flops_per_second[precision]


@dataclass(frozen=True)
class Link:
    """Link between accelerators: bytes/s of one accelerator in one direction, and latency in
    seconds.

    With `has_multicast_reduction` the switch itself sums (NVLink SHARP): an all-reduce sends each
    byte once.
    """

    name: str
    kind: LinkKind
    bytes_per_second: float
    latency_seconds: float
    has_multicast_reduction: bool = False
    sources: Mapping[str, str] = field(default_factory=dict, hash=False, compare=False, repr=False)


@dataclass(frozen=True)
class Node:
    """Kind of machine: its number of accelerators, the link between them, and the usual link to
    others.

    `intra` connects `domain_size` accelerators: those of one machine, or of a rack (72 in an
    NVL72).
    """

    name: str
    accelerator: Accelerator
    num_accelerators: int
    intra: Link
    inter: Link
    domain_size: int


@dataclass(frozen=True)
class Cluster:
    """`num_nodes` machines of `gpus_per_node` accelerators. Ranks are numbered node by node.

    `intra` connects each `domain_size` consecutive ranks (default: a node); `inter` connects
    these domains (None for a single domain). `profile` contains measured rates, which override
    the catalogue's.

    >>> one = Accelerator("any", 2**30, 1e11, {"bf16": 1e12})
    >>> fast, slow = Link("fast", "nvlink", 4e11, 1e-6), Link("slow", "infiniband", 5e10, 5e-6)
    >>> cluster = Cluster(one, gpus_per_node=8, num_nodes=4, intra=fast, inter=slow)
    >>> cluster.num_gpus, cluster.get_link(8, 1).name, cluster.get_link(4, 8).name
    (32, 'fast', 'slow')
    >>> cluster.count_ranks_per_domain(16, 4)
    2
    """

    accelerator: Accelerator
    gpus_per_node: int
    num_nodes: int
    intra: Link
    inter: Link | None = None
    domain_size: int = 0
    profile: MeasuredProfile | None = field(default=None, hash=False, compare=False, repr=False)
    num_host_cores: float | None = None
    """Cores of this machine, if the rates of its CPU ranks are guessed from them
    (`host_cpu.guess_host`)."""

    def __post_init__(self) -> None:
        for name in ("gpus_per_node", "num_nodes"):
            if getattr(self, name) < 1:
                raise InputError(
                    "must be at least 1", field=f"cluster.{name}", got=getattr(self, name)
                )
        if self.num_gpus > MAX_GPUS:
            raise InputError(
                "the cluster is too large",
                field="cluster",
                got=f"{self.num_gpus} GPUs",
                allowed=f"at most {MAX_GPUS:,}",
            )
        if not self.domain_size:
            object.__setattr__(self, "domain_size", self.gpus_per_node)
        if self.num_gpus > self.domain_size and self.inter is None:
            raise InputError(
                "no link connects the nodes",
                field="cluster.link",
                remedy="Name one, e.g. --link ib400 (see the links of the hardware catalogue)",
            )

    @property
    def num_gpus(self) -> int:
        """Number of accelerators in the cluster."""
        return self.gpus_per_node * self.num_nodes

    def count_ranks_per_domain(self, num_ranks: int, stride: int) -> int:
        """Return the number of a group's ranks, `stride` apart, that one `intra` domain
        contains."""
        return max(1, min(num_ranks, self.domain_size // stride))

    def get_link(self, num_ranks: int, stride: int) -> Link:
        """Return the slowest link that connects a group of `num_ranks` ranks, `stride`
        apart."""
        if (num_ranks - 1) * stride < self.domain_size or self.inter is None:
            return self.intra
        return self.inter

    @property
    def rates_source(self) -> str:
        """Source of the rates: data sheets, or a measured profile with its device and date."""
        profile = self.profile
        if self.num_host_cores is not None:
            return f"guessed from the {self.num_host_cores:g} cores of this machine"
        if profile is None:
            return "data sheets"
        counts = (
            f"{len(profile.matmuls)} products, {len(profile.attention)} attention lengths, "
            f"{len(profile.collectives)} collectives"
        )
        return f"measured on {profile.accelerator} at {profile.measured_at}: {counts}"

    @property
    def core_shortage(self) -> str | None:
        """Description of CPU ranks that share cores, by the profile's count or this machine's;
        None if each has its own, or if nobody has counted."""
        source = "this machine" if self.profile is None else "measured profile"
        cores = self.num_host_cores if self.profile is None else self.profile.num_cores
        if self.accelerator.kind != "cpu" or cores is None or self.gpus_per_node <= cores:
            return None
        return (
            f"{self.gpus_per_node} ranks share the {cores:g} cores of a host ({source}), "
            f"so steps take up to {self.gpus_per_node / cores:.1f} times as long as with a core "
            f"for each; plan at most {max(1, int(cores))} ranks per host"
        )

    @property
    def name(self) -> str:
        """Short name, such as `4 x 8xH100-80GB-SXM over ib400`."""
        node = f"{self.gpus_per_node}x{self.accelerator.name}"
        if self.num_nodes == 1:
            return node
        return f"{self.num_nodes} x {node}" + (f" over {self.inter.name}" if self.inter else "")
