"""Catalogue of accelerators and links, and parsing of clusters.

`catalog/` has one YAML file per accelerator and one for all links; each number cites its
source. The module imports no torch.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from shardwright.errors import InputError
from shardwright.hardware.cluster_spec import MAX_GPUS, Accelerator, Cluster, Link, Node
from shardwright.hardware.measured_profile import MeasuredProfile

_SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def parse_yaml_table(text: str) -> Any:
    """Parse a table of the package with PyYAML's parser in C, if available: it is ten times as
    fast."""
    return yaml.load(text, Loader=_SafeLoader)  # noqa: S506 - a subclass of SafeLoader


_MAX_DIGITS = 9
_COUNT_PREFIX = re.compile(r"^\s*(\d+)\s*[xX*]\s*(.+?)\s*$")
_NAME_NOISE = re.compile(r"nvidia|amd|intel|habana|instinct|tesla|geforce|[^a-z0-9]")
_MEMORY_SIZE = re.compile(r"(?<![a-z0-9.])(\d+(?:\.\d+)?) ?gi?b?\b")
_FORM_FACTOR = re.compile(r"\b(sxm|pcie?|pci-e|nvl|oam)\d?\b")
_NAME_FILLERS = re.compile(
    r"\b(hbm\d?e?|gddr\d?x?|\d+ ?w|gpus?|tensor core|graphics|accelerators?|cards?"
    r"|gen(eration)?|[dh]gx|nodes?|servers?|cloud|clusters?|each"
    r"|memory|v?ram|size|not|stated|given|reported|un(known|stated|specified|reported))\b"
)
_ALTERNATIVE_SIZES = re.compile(r"\b\d+ ?(?:gi?b?)? ?(?:/|\bor\b) ?\d+ ?gi?b?\b")
"""Two memory sizes of which one is meant: `A100 40/80GB`."""


@dataclass(frozen=True)
class _LinkEntry:
    """A link of the catalogue; `is_shared` if all accelerators of a node share one adapter."""

    link: Link
    is_shared: bool


def _normalise_name(name: str) -> str:
    """Remove case, punctuation and vendor names: `NVIDIA H100 SXM` and `h100-sxm` become equal.

    >>> _normalise_name("NVIDIA GeForce RTX 4090"), _normalise_name("A100-80GB-SXM")
    ('rtx4090', 'a10080gbsxm')
    """
    return _NAME_NOISE.sub("", name.lower())


@dataclass(frozen=True)
class _AcceleratorName:
    """Family, memory in GB and form factor in the name of an accelerator; None if absent."""

    family: str
    memory_gb: float | None
    form_factor: str | None

    @classmethod
    def parse(cls, name: str) -> _AcceleratorName:
        """Parse a name in any notation that tables and drivers use.

        >>> name = _AcceleratorName("a100", 80.0, "sxm")
        >>> name == _AcceleratorName.parse("NVIDIA A100-SXM4-80GB")
        True
        >>> name == _AcceleratorName.parse("A100 80G (SXM)")
        True
        """
        text = re.sub(r"[-_(),/?]+", " ", _ALTERNATIVE_SIZES.sub(" ", name.lower()))
        memory = _MEMORY_SIZE.search(text)
        form = _FORM_FACTOR.search(text)
        rest = _NAME_FILLERS.sub(" ", _FORM_FACTOR.sub(" ", _MEMORY_SIZE.sub(" ", text)))
        mounted = None if form is None else "pcie" if form[1].startswith("pci") else form[1]
        return cls(_normalise_name(rest), float(memory[1]) if memory else None, mounted)

    def is_compatible(self, other: _AcceleratorName) -> bool:
        """True if both names have the same family and do not differ in memory or form
        factor."""
        memory = (
            self.memory_gb is None
            or other.memory_gb is None
            or abs(self.memory_gb / other.memory_gb - 1) < _MEMORY_TOLERANCE
        )
        return (
            self.family == other.family
            and memory
            and (
                None in (self.form_factor, other.form_factor)
                or self.form_factor == other.form_factor
            )
        )


_MEMORY_TOLERANCE = 0.03
"""Relative difference between nominal sizes of the same memory: 95 and 96, 180 and 183 GB."""


@cache
def _load_catalog() -> tuple[
    dict[str, Node], dict[str, str], dict[str, _LinkEntry], dict[str, str]
]:
    """Return nodes and accelerator names, then links and link names; names by their normalised
    form."""
    folder = files("shardwright.hardware") / "catalog"
    texts = {entry.name: entry.read_text(encoding="utf-8") for entry in folder.iterdir()}
    documents = {name: parse_yaml_table(text) for name, text in texts.items()}
    links, link_names = _read_links(documents.pop("links.yaml"))
    nodes: dict[str, Node] = {}
    names: dict[str, str] = {}
    for document in documents.values():
        node = _read_node(document, links)
        nodes[node.accelerator.name] = node
        for alias in (node.accelerator.name, *document["aliases"]):
            other = names.setdefault(_normalise_name(alias), node.accelerator.name)
            assert other == node.accelerator.name, (
                f"{alias} is both {other} and {node.accelerator.name}"
            )
    return nodes, names, links, link_names


def _read_links(document: Mapping[str, Any]) -> tuple[dict[str, _LinkEntry], dict[str, str]]:
    links: dict[str, _LinkEntry] = {}
    names: dict[str, str] = {}
    texts = document["documents"]
    for name, entry in document["links"].items():
        link = Link(
            name=name,
            kind=entry["kind"],
            bytes_per_second=float(entry["bytes_per_second"]),
            latency_seconds=float(entry["latency_seconds"]),
            has_multicast_reduction=entry.get("multicast_reduction", False),
            sources={"bytes_per_second": texts[entry["source"]], "latency_seconds": texts["nccl"]},
        )
        links[name] = _LinkEntry(link, is_shared=entry["per"] == "node")
        names.update({_normalise_name(alias): name for alias in (name, *entry.get("aliases", ()))})
    return links, names


def _read_node(document: Mapping[str, Any], links: Mapping[str, _LinkEntry]) -> Node:
    texts = document["documents"]
    peaks = document["peak_flops_per_second"]
    sustained = document.get("sustained_flops_per_second", {})
    numbers = {
        name: document[name] for name in ("memory_bytes", "memory_bytes_per_second", "power_watts")
    }
    sources = {name: texts[entry["source"]] for name, entry in (numbers | peaks).items()}
    accelerator = Accelerator(
        name=document["name"],
        memory_bytes=int(numbers["memory_bytes"]["value"]),
        memory_bytes_per_second=float(numbers["memory_bytes_per_second"]["value"]),
        peak_flops_per_second={
            precision: float(entry["value"]) for precision, entry in peaks.items()
        },
        kind=document["kind"],
        vendor=document["vendor"],
        generation=document["generation"],
        power_watts=float(numbers["power_watts"]["value"]),
        sustained_flops_per_second={
            precision: float(entry["value"]) for precision, entry in sustained.items()
        },
        sources=sources
        | {
            f"sustained {precision}": texts[entry["source"]]
            for precision, entry in sustained.items()
        },
    )
    node = document["node"]
    count = int(node["accelerators"])
    adapters, inter = _split_count(node["inter"], "inter")
    return Node(
        name=node["name"],
        accelerator=accelerator,
        num_accelerators=count,
        intra=links[node["intra"]].link,
        inter=_divide_link(links[inter], adapters, count),
        domain_size=int(node["domain_size"]),
    )


def _divide_link(entry: _LinkEntry, num_adapters: int | None, gpus_per_node: int) -> Link:
    """Return one accelerator's share of a link with `num_adapters` per node (None: the usual
    number)."""
    if num_adapters is None and not entry.is_shared:
        return entry.link
    share = (num_adapters or 1) / gpus_per_node
    name = f"{num_adapters}x{entry.link.name}" if num_adapters else entry.link.name
    return replace(entry.link, name=name, bytes_per_second=entry.link.bytes_per_second * share)


def list_accelerators() -> tuple[str, ...]:
    """Return the names of the catalogue's accelerators."""
    return tuple(sorted(_load_catalog()[0]))


def list_links() -> tuple[str, ...]:
    """Return the names of the catalogue's links."""
    return tuple(_load_catalog()[2])


def find_node(name: str) -> Node:
    """Return the usual machine of an accelerator, by any of its names.

    Raises:
        InputError: unknown; lists the closest names.

    >>> find_node("nvidia h100").accelerator.name, find_node("GB200").domain_size
    ('H100-80GB-SXM', 72)
    """
    nodes, names, _, _ = _load_catalog()
    known = names.get(_normalise_name(name)) or _find_by_name_parts(name)
    if known is None:
        raise InputError(
            "unknown accelerator (not in the catalogue)",
            field="cluster",
            got=name,
            allowed=_list_closest_names(name, names, list_accelerators()),
            remedy="Use one of these names, or CPU for the cores of this machine, or add a file to "
            "hardware/catalog",
        )
    return nodes[known]


def _find_by_name_parts(name: str) -> str | None:
    """Return the accelerator that matches an unlisted name by family, memory and form factor,
    or None.

    If several match, prefer the one that the catalogue lists for the family name, alone or with
    memory.
    """
    nodes, names, _, _ = _load_catalog()
    parts = _AcceleratorName.parse(name)
    if parts.family not in names and parts.family.endswith("s"):
        parts = replace(parts, family=parts.family.removesuffix("s"))  # `64 H100s`
    matches = [known for known in nodes if parts.is_compatible(_AcceleratorName.parse(known))]
    usual = (
        names.get(parts.family),
        names.get(_normalise_name(f"{parts.family} {parts.memory_gb or 0:g}gb")),
    )
    return next((known for known in (*usual, *matches) if known in matches), None)


def states_memory(name: str) -> bool:
    """Return True if an accelerator's name determines its memory: it has a size, or the
    catalogue has one size of its family.

    >>> states_memory("A100"), states_memory("A100 (80 GB)"), states_memory("RTX 4090")
    (False, True, True)
    """
    family = _AcceleratorName.parse(find_node(name).accelerator.name).family
    sizes = {
        parts.memory_gb
        for known in list_accelerators()
        if (parts := _AcceleratorName.parse(known)).family == family
    }
    return len(sizes) == 1 or _AcceleratorName.parse(name).memory_gb is not None


def find_accelerator(name: str) -> Accelerator:
    """Return an accelerator by any of its names; raise InputError with the closest ones if
    unknown."""
    return find_node(name).accelerator


def find_link(name: str, gpus_per_node: int) -> Link:
    """Return one accelerator's share of a link; "4xib200" means four adapters per node.

    Raises:
        InputError: unknown; lists the closest names.

    >>> find_link("4xib200", 8).bytes_per_second / 1e9
    12.5
    >>> find_link("eth100", 4).bytes_per_second / 1e9
    3.125
    """
    _, _, by_name, names = _load_catalog()
    adapters, base_name = _split_count(name, "link")
    known = names.get(_normalise_name(base_name))
    if known is None or adapters == 0:
        raise InputError(
            "this link is not in the catalogue",
            field="link",
            got=name,
            allowed=_list_closest_names(base_name, names, list_links()),
            remedy=(
                "Use one of these names, optionally with a number of adapters per node: 4xib200"
            ),
        )
    return _divide_link(by_name[known], adapters, gpus_per_node)


def parse_cluster(
    text: str,
    *,
    num_nodes: int = 1,
    link: str | None = None,
    profile: MeasuredProfile | None = None,
) -> Cluster:
    """Parse a cluster in the notation of the command line.

    Args:
        text: `8xH100-80GB`: accelerators per node; the default number is the usual machine's.
        num_nodes: number of machines.
        link: link between machines; default the usual one for this accelerator.
        profile: measured rates; its memory and memory bandwidth replace the catalogue's.

    Raises:
        InputError: an unknown accelerator or link (with the closest names), no machine, or rates
            of CPUs for GPUs or the reverse.

    >>> cluster = parse_cluster("8xH100-80GB", num_nodes=4, link="ib400")
    >>> cluster.name, cluster.num_gpus, cluster.intra.name
    ('4 x 8xH100-80GB-SXM over ib400', 32, 'nvlink4')
    """
    given, name = _split_count(text, "cluster")
    node = find_node(name)
    count = node.num_accelerators if given is None else given
    usual_inter = node.inter if count == node.num_accelerators else _find_usual_inter(node, count)
    domain = node.domain_size if node.domain_size > node.num_accelerators else count
    accelerator = node.accelerator
    if profile is not None:
        _check_profile_kind(profile, accelerator)
        accelerator = replace(
            accelerator,
            memory_bytes=profile.memory_bytes,
            memory_bytes_per_second=profile.memory_bytes_per_second,
        )
    return Cluster(
        accelerator=accelerator,
        gpus_per_node=count,
        num_nodes=num_nodes,
        intra=node.intra,
        inter=find_link(link, count) if link else usual_inter,
        domain_size=domain,
        profile=profile,
    )


def _check_profile_kind(profile: MeasuredProfile, accelerator: Accelerator) -> None:
    """Refuse rates of CPUs for GPUs, and the reverse: every predicted time would be wrong."""
    measured = profile.catalog_name
    if measured not in list_accelerators() or find_accelerator(measured).kind == accelerator.kind:
        return
    raise InputError(
        "the rates were measured on a device of another kind than the cluster's",
        field="profile",
        got=f"rates of {profile.accelerator}",
        allowed=f"rates of {accelerator.name}",
        remedy="Run `shardwright doctor --calibrate` on such a device, or omit the profile",
    )


def _split_count(text: str, field: str) -> tuple[int | None, str]:
    """Split `8xH100` into number and name; the number is None if there is none.

    Raises:
        InputError: a number of more than `_MAX_DIGITS` digits; int() refuses more than 4,300.
    """
    counted = _COUNT_PREFIX.match(text)
    if counted is None:
        return None, text
    digits = counted[1].lstrip("0") or "0"
    if len(digits) > _MAX_DIGITS:
        is_long = len(digits) > 2 * _MAX_DIGITS
        raise InputError(
            "the number is too large",
            field=field,
            got=f"{digits[:_MAX_DIGITS]}... ({len(digits):,} digits)" if is_long else digits,
            allowed=f"at most {MAX_GPUS:,}",
        )
    return int(digits), counted[2]


def _find_usual_inter(node: Node, num_accelerators: int) -> Link:
    """Return the usual link between nodes, shared by an unusual number of accelerators."""
    return find_link(node.inter.name, num_accelerators) if num_accelerators else node.inter


def _list_closest_names(word: str, names: Mapping[str, str], known: Iterable[str]) -> str:
    close = difflib.get_close_matches(_normalise_name(word), list(names), n=4, cutoff=0.5)
    closest = dict.fromkeys(names[alias] for alias in close)
    return "closest: " + ", ".join(closest) if closest else ", ".join(known)
