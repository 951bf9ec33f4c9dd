"""What a run is planned for: accelerators, the links between them, and how many of them there are. Torch-free values.

Base units throughout: bytes, seconds, FLOP/s of dense products. A link's rate is what one accelerator can send in one
direction while it receives as much: half of what data sheets call bidirectional, and per GPU where a node shares adapters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from shardwright.errors import InputError

if TYPE_CHECKING:
    from shardwright.hardware.profile import MeasuredProfile

MOST_GPUS = 262_144
"""Accelerators of a cluster at most; a search over more would take minutes."""

AcceleratorKind = Literal["gpu", "cpu"]
LinkKind = Literal["nvlink", "infinity_fabric", "pcie", "infiniband", "ethernet", "shared_memory"]


@dataclass(frozen=True)
class Accelerator:
    """One GPU (or the cores of one CPU socket) as its maker rates it.

    `memory_bytes` is what the driver offers to a process, which is a little under the name's gigabytes.
    `peak_flops_per_second` maps a precision (fp64, fp32, tf32, bf16, fp16, fp8, fp4) to dense products; a precision that is
    missing is one for which the device has no units. `sources` tells for each number where it stands.
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
    """What the largest products reach of a precision's peak, where its maker or a public benchmark measured it."""
    sources: Mapping[str, str] = field(default_factory=dict, hash=False, compare=False, repr=False)

    @property
    def has_bf16_units(self) -> bool:
        """True if it multiplies bf16 faster than fp32."""
        peaks = self.peak_flops_per_second
        return peaks.get("bf16", 0.0) > peaks.get("fp32", 0.0)

    def peak(self, precision: str) -> float:
        """Dense peak in FLOP/s of `precision`.

        Raises:
            InputError: the device has no units for it; names those it has.
        """
        if precision not in self.peak_flops_per_second:
            raise InputError(
                f"{self.name} has no units for {precision}",
                field="precision",
                got=precision,
                allowed=", ".join(self.peak_flops_per_second),
                remedy="Take one of these precisions, or another accelerator",
            )
        return self.peak_flops_per_second[precision]


@dataclass(frozen=True)
class Link:
    """One way between accelerators: bytes/s that one of them sends while it receives as much, and seconds before the first byte.

    `multicast_reduction` says whether the switch itself adds (NVLink SHARP): an all-reduce then sends each byte once.
    """

    name: str
    kind: LinkKind
    bytes_per_second: float
    latency_seconds: float
    multicast_reduction: bool = False
    sources: Mapping[str, str] = field(default_factory=dict, hash=False, compare=False, repr=False)


@dataclass(frozen=True)
class Node:
    """A kind of machine as it is sold: how many accelerators, the link between them, and its usual link outwards.

    `domain_size` accelerators reach one another over `intra`: those of one machine, or of a whole rack (72 in an NVL72).
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

    `intra` joins each `domain_size` consecutive ranks (default: a node's), `inter` joins the rest; None where there is no rest.
    `profile` holds rates measured on the machine itself, which planners prefer to the data sheets'.

    >>> one = Accelerator("any", 2**30, 1e11, {"bf16": 1e12})
    >>> fast, slow = Link("fast", "nvlink", 4e11, 1e-6), Link("slow", "infiniband", 5e10, 5e-6)
    >>> cluster = Cluster(one, gpus_per_node=8, num_nodes=4, intra=fast, inter=slow)
    >>> cluster.num_gpus, cluster.link(8, 1).name, cluster.link(4, 8).name, cluster.ranks_per_domain(16, 4)
    (32, 'fast', 'slow', 2)
    """

    accelerator: Accelerator
    gpus_per_node: int
    num_nodes: int
    intra: Link
    inter: Link | None = None
    domain_size: int = 0
    profile: MeasuredProfile | None = field(default=None, hash=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("gpus_per_node", "num_nodes"):
            if getattr(self, name) < 1:
                raise InputError("a cluster has at least one of them", field=f"cluster.{name}", got=getattr(self, name))
        if self.num_gpus > MOST_GPUS:
            raise InputError(
                "no cluster is so large", field="cluster", got=f"{self.num_gpus} GPUs", allowed=f"at most {MOST_GPUS:,}"
            )
        if not self.domain_size:
            object.__setattr__(self, "domain_size", self.gpus_per_node)
        if self.num_gpus > self.domain_size and self.inter is None:
            raise InputError(
                "no link joins the nodes",
                field="cluster.link",
                remedy="Name one, e.g. --link ib400 (see the links of the hardware catalogue)",
            )

    @property
    def num_gpus(self) -> int:
        """Accelerators of the whole cluster."""
        return self.gpus_per_node * self.num_nodes

    def ranks_per_domain(self, num_ranks: int, stride: int) -> int:
        """How many members of a group, `stride` ranks apart, sit within one fast domain."""
        return max(1, min(num_ranks, self.domain_size // stride))

    def link(self, num_ranks: int, stride: int) -> Link:
        """The slowest link that a group of `num_ranks` members, `stride` ranks apart, must cross."""
        if (num_ranks - 1) * stride < self.domain_size or self.inter is None:
            return self.intra
        return self.inter

    @property
    def rates(self) -> str:
        """Where rates come from: data sheets, or what was measured, when and on what."""
        profile = self.profile
        if profile is None:
            return "data sheets"
        counts = f"{len(profile.matmuls)} products, {len(profile.attention)} rows of attention, {len(profile.collectives)} messages"
        return f"measured on {profile.accelerator} at {profile.measured_at}: {counts}"

    @property
    def name(self) -> str:
        """As a person says it: `4 x 8xH100-80GB-SXM over ib400`."""
        node = f"{self.gpus_per_node}x{self.accelerator.name}"
        if self.num_nodes == 1:
            return node
        return f"{self.num_nodes} x {node}" + (f" over {self.inter.name}" if self.inter else "")
