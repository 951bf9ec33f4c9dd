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
from shardwright.hardware.cluster import Accelerator, Cluster, Link, Node
from shardwright.hardware.profile import MeasuredProfile

_SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""PyYAML's parser in C, if available: it reads the catalogue ten times as fast."""

_MOST_DIGITS = 9
_COUNTED = re.compile(r"^\s*(\d+)\s*[xX*]\s*(.+?)\s*$")
_NOISE = re.compile(r"nvidia|amd|intel|habana|instinct|tesla|geforce|[^a-z0-9]")
_MEMORY = re.compile(r"(?<![a-z0-9.])(\d+(?:\.\d+)?) ?gi?b?\b")
_FORM = re.compile(r"\b(sxm|pcie?|pci-e|nvl|oam)\d?\b")
_WORDS = re.compile(
    r"\b(hbm\d?e?|gddr\d?x?|\d+ ?w|gpus?|tensor core|graphics|accelerators?|cards?"
    r"|gen(eration)?|[dh]gx|nodes?|servers?|cloud)\b"
)


@dataclass(frozen=True)
class _LinkEntry:
    """A link of the catalogue; `shared` if all accelerators of a node share one adapter."""

    link: Link
    shared: bool


def _plain(name: str) -> str:
    """Remove case, punctuation and vendor names: `NVIDIA H100 SXM` and `h100-sxm` become equal.

    >>> _plain("NVIDIA GeForce RTX 4090"), _plain("A100-80GB-SXM")
    ('rtx4090', 'a10080gbsxm')
    """
    return _NOISE.sub("", name.lower())


@dataclass(frozen=True)
class _Parts:
    """Family, memory in GB and form factor in the name of an accelerator; None if absent."""

    family: str
    memory: float | None
    form: str | None

    @classmethod
    def of(cls, name: str) -> _Parts:
        """Parse a name in any notation that tables and drivers use.

        >>> _Parts.of("NVIDIA A100-SXM4-80GB") == _Parts.of("A100 80G (SXM)")
        True
        >>> _Parts.of("A100 80G (SXM)") == _Parts("a100", 80.0, "sxm")
        True
        """
        text = re.sub(r"[-_(),/]+", " ", name.lower())
        memory = _MEMORY.search(text)
        form = _FORM.search(text)
        rest = _WORDS.sub(" ", _FORM.sub(" ", _MEMORY.sub(" ", text)))
        mounted = None if form is None else "pcie" if form[1].startswith("pci") else form[1]
        return cls(_plain(rest), float(memory[1]) if memory else None, mounted)

    def admits(self, other: _Parts) -> bool:
        """True if both names have the same family and do not differ in memory or form
        factor."""
        memory = (
            self.memory is None
            or other.memory is None
            or abs(self.memory / other.memory - 1) < _NEAR_MEMORY
        )
        return (
            self.family == other.family
            and memory
            and (None in (self.form, other.form) or self.form == other.form)
        )


_NEAR_MEMORY = 0.03
"""Relative difference between nominal sizes of the same memory: 95 and 96, 180 and 183 GB."""


@cache
def _catalog() -> tuple[dict[str, Node], dict[str, str], dict[str, _LinkEntry], dict[str, str]]:
    """Return nodes and accelerator names, then links and link names; names by their normalised
    form."""
    folder = files("shardwright.hardware") / "catalog"
    texts = {entry.name: entry.read_text(encoding="utf-8") for entry in folder.iterdir()}
    documents = {
        name: yaml.load(text, Loader=_SafeLoader)  # noqa: S506 - a safe loader
        for name, text in texts.items()
    }
    links, link_names = _read_links(documents.pop("links.yaml"))
    nodes: dict[str, Node] = {}
    names: dict[str, str] = {}
    for document in documents.values():
        node = _read_node(document, links)
        nodes[node.accelerator.name] = node
        for alias in (node.accelerator.name, *document["aliases"]):
            other = names.setdefault(_plain(alias), node.accelerator.name)
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
            multicast_reduction=entry.get("multicast_reduction", False),
            sources={"bytes_per_second": texts[entry["source"]], "latency_seconds": texts["nccl"]},
        )
        links[name] = _LinkEntry(link, shared=entry["per"] == "node")
        names.update({_plain(alias): name for alias in (name, *entry.get("aliases", ()))})
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
    counted = _COUNTED.match(node["inter"])
    adapters, inter = (
        (int(counted[1]), links[counted[2]]) if counted else (None, links[node["inter"]])
    )
    return Node(
        name=node["name"],
        accelerator=accelerator,
        num_accelerators=count,
        intra=links[node["intra"]].link,
        inter=_per_accelerator(inter, adapters, count),
        domain_size=int(node["domain_size"]),
    )


def _per_accelerator(entry: _LinkEntry, adapters: int | None, gpus_per_node: int) -> Link:
    """Return one accelerator's share of a link with `adapters` per node (None: the usual
    number)."""
    if adapters is None and not entry.shared:
        return entry.link
    share = (adapters or 1) / gpus_per_node
    name = f"{adapters}x{entry.link.name}" if adapters else entry.link.name
    return replace(entry.link, name=name, bytes_per_second=entry.link.bytes_per_second * share)


def accelerators() -> tuple[str, ...]:
    """Return the names of the catalogue's accelerators."""
    return tuple(sorted(_catalog()[0]))


def links() -> tuple[str, ...]:
    """Return the names of the catalogue's links."""
    return tuple(_catalog()[2])


def find_node(name: str) -> Node:
    """Return the usual machine of an accelerator, by any of its names.

    Raises:
        InputError: unknown; lists the closest names.

    >>> find_node("nvidia h100").accelerator.name, find_node("GB200").domain_size
    ('H100-80GB-SXM', 72)
    """
    nodes, names, _, _ = _catalog()
    known = names.get(_plain(name)) or _find_by_parts(name)
    if known is None:
        raise InputError(
            "this accelerator is not in the catalogue",
            field="cluster",
            got=name,
            allowed=_nearest(name, names, accelerators()),
            remedy="Use one of these names, or add a file to hardware/catalog",
        )
    return nodes[known]


def _find_by_parts(name: str) -> str | None:
    """Return the accelerator that matches an unlisted name by family, memory and form factor,
    or None.

    If several match, prefer the one that the catalogue lists for the family name, alone or with
    memory.
    """
    nodes, names, _, _ = _catalog()
    parts = _Parts.of(name)
    if parts.family not in names and parts.family.endswith("s"):
        parts = replace(parts, family=parts.family.removesuffix("s"))  # `64 H100s`
    matches = [known for known in nodes if parts.admits(_Parts.of(known))]
    usual = (names.get(parts.family), names.get(_plain(f"{parts.family} {parts.memory or 0:g}gb")))
    return next((known for known in (*usual, *matches) if known in matches), None)


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
    _, _, by_name, names = _catalog()
    counted = _COUNTED.match(name)
    adapters, base_name = (int(counted[1]), counted[2]) if counted else (None, name)
    known = names.get(_plain(base_name))
    if known is None or adapters == 0:
        raise InputError(
            "this link is not in the catalogue",
            field="link",
            got=name,
            allowed=_nearest(base_name, names, links()),
            remedy=(
                "Use one of these names, optionally with a number of adapters per node: 4xib200"
            ),
        )
    return _per_accelerator(by_name[known], adapters, gpus_per_node)


def parse_cluster(
    text: str,
    *,
    nodes: int = 1,
    link: str | None = None,
    profile: MeasuredProfile | None = None,
    domain_size: int | None = None,
) -> Cluster:
    """Parse a cluster in the notation of the command line.

    Args:
        text: `8xH100-80GB`: accelerators per node; the default number is the usual machine's.
        nodes: number of machines.
        link: link between machines; default the usual one for this accelerator.
        profile: measured rates; its memory and memory bandwidth replace the catalogue's.
        domain_size: accelerators connected by the fast link; default those of a node or rack.

    Raises:
        InputError: an unknown accelerator or link (with the closest names), or no machine.

    >>> cluster = parse_cluster("8xH100-80GB", nodes=4, link="ib400")
    >>> cluster.name, cluster.num_gpus, cluster.intra.name
    ('4 x 8xH100-80GB-SXM over ib400', 32, 'nvlink4')
    """
    counted = _COUNTED.match(text)
    node = find_node(counted[2] if counted else text)
    # int() refuses text of more than 4,300 digits.
    count = int(counted[1][:_MOST_DIGITS]) if counted else node.num_accelerators
    usual_inter = node.inter if count == node.num_accelerators else _inter_for(node, count)
    domain = domain_size or (
        node.domain_size if node.domain_size > node.num_accelerators else count
    )
    accelerator = node.accelerator
    if profile is not None:
        accelerator = replace(
            accelerator,
            memory_bytes=profile.memory_bytes,
            memory_bytes_per_second=profile.memory_bytes_per_second,
        )
    return Cluster(
        accelerator=accelerator,
        gpus_per_node=count,
        num_nodes=nodes,
        intra=node.intra,
        inter=find_link(link, count) if link else usual_inter,
        domain_size=domain,
        profile=profile,
    )


def _inter_for(node: Node, count: int) -> Link:
    """Return the usual link between nodes, shared by an unusual number of accelerators."""
    return find_link(node.inter.name, count) if count else node.inter


def _nearest(word: str, names: Mapping[str, str], known: Iterable[str]) -> str:
    close = difflib.get_close_matches(_plain(word), list(names), n=4, cutoff=0.5)
    closest = dict.fromkeys(names[alias] for alias in close)
    return "closest: " + ", ".join(closest) if closest else ", ".join(known)
