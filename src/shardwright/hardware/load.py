"""The catalogue: accelerators and links by name, and clusters as they are written on a command line. Torch-free.

One YAML file per accelerator in `catalog/`, one for all links; each number stands beside the document it was read from.
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
"""The parser in C, where PyYAML was built with it: the catalogue in a tenth of the time."""

_MOST_DIGITS = 9
_COUNTED = re.compile(r"^\s*(\d+)\s*[xX*]\s*(.+?)\s*$")
_NOISE = re.compile(r"nvidia|amd|intel|habana|instinct|tesla|geforce|[^a-z0-9]")
_MEMORY = re.compile(r"(?<![a-z0-9.])(\d+(?:\.\d+)?) ?gi?b?\b")
_FORM = re.compile(r"\b(sxm|pcie?|pci-e|nvl|oam)\d?\b")
_WORDS = re.compile(
    r"\b(hbm\d?e?|gddr\d?x?|\d+ ?w|gpus?|tensor core|graphics|accelerators?|cards?|gen(eration)?|[dh]gx|nodes?|servers?|cloud)\b"
)


@dataclass(frozen=True)
class _LinkEntry:
    """A link of the catalogue; `shared` when a node's accelerators share one adapter."""

    link: Link
    shared: bool


def _plain(name: str) -> str:
    """A spelling without case, punctuation and makers' names: `NVIDIA H100 SXM` and `h100-sxm` are one.

    >>> _plain("NVIDIA GeForce RTX 4090"), _plain("A100-80GB-SXM")
    ('rtx4090', 'a10080gbsxm')
    """
    return _NOISE.sub("", name.lower())


@dataclass(frozen=True)
class _Parts:
    """What a spelling says of an accelerator: its family, its memory in GB and how it is mounted, None where it does not say."""

    family: str
    memory: float | None
    form: str | None

    @classmethod
    def of(cls, name: str) -> _Parts:
        """The parts of a name as tables and drivers write it.

        >>> _Parts.of("NVIDIA A100-SXM4-80GB") == _Parts.of("A100 80G (SXM)") == _Parts("a100", 80.0, "sxm")
        True
        """
        text = re.sub(r"[-_(),/]+", " ", name.lower())
        memory, form = _MEMORY.search(text), _FORM.search(text)
        rest = _WORDS.sub(" ", _FORM.sub(" ", _MEMORY.sub(" ", text)))
        mounted = None if form is None else "pcie" if form[1].startswith("pci") else form[1]
        return cls(_plain(rest), float(memory[1]) if memory else None, mounted)

    def admits(self, other: _Parts) -> bool:
        """Whether a catalogue's name may be meant: of the same family, and not of another memory or mounting."""
        memory = self.memory is None or other.memory is None or abs(self.memory / other.memory - 1) < _NEAR_MEMORY
        return self.family == other.family and memory and (None in (self.form, other.form) or self.form == other.form)


_NEAR_MEMORY = 0.03
"""Between what a name's gigabytes may say of one memory: 95 and 96, 180 and 183."""


@cache
def _catalog() -> tuple[dict[str, Node], dict[str, str], dict[str, _LinkEntry], dict[str, str]]:
    """Nodes by accelerator name, accelerator names by plain spelling, links by name, link names by plain spelling."""
    folder = files("shardwright.hardware") / "catalog"
    texts = {entry.name: entry.read_text(encoding="utf-8") for entry in folder.iterdir()}
    documents = {name: yaml.load(text, Loader=_SafeLoader) for name, text in texts.items()}  # noqa: S506 - it is a safe one
    links, link_names = _read_links(documents.pop("links.yaml"))
    nodes: dict[str, Node] = {}
    names: dict[str, str] = {}
    for document in documents.values():
        node = _read_node(document, links)
        nodes[node.accelerator.name] = node
        for spelling in (node.accelerator.name, *document["aliases"]):
            other = names.setdefault(_plain(spelling), node.accelerator.name)
            assert other == node.accelerator.name, f"{spelling} is both {other} and {node.accelerator.name}"
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
        names.update({_plain(spelling): name for spelling in (name, *entry.get("aliases", ()))})
    return links, names


def _read_node(document: Mapping[str, Any], links: Mapping[str, _LinkEntry]) -> Node:
    texts = document["documents"]
    peaks, sustained = document["peak_flops_per_second"], document.get("sustained_flops_per_second", {})
    numbers = {name: document[name] for name in ("memory_bytes", "memory_bytes_per_second", "power_watts")}
    sources = {name: texts[entry["source"]] for name, entry in (numbers | peaks).items()}
    accelerator = Accelerator(
        name=document["name"],
        memory_bytes=int(numbers["memory_bytes"]["value"]),
        memory_bytes_per_second=float(numbers["memory_bytes_per_second"]["value"]),
        peak_flops_per_second={precision: float(entry["value"]) for precision, entry in peaks.items()},
        kind=document["kind"],
        vendor=document["vendor"],
        generation=document["generation"],
        power_watts=float(numbers["power_watts"]["value"]),
        sustained_flops_per_second={precision: float(entry["value"]) for precision, entry in sustained.items()},
        sources=sources | {f"sustained {precision}": texts[entry["source"]] for precision, entry in sustained.items()},
    )
    node = document["node"]
    count = int(node["accelerators"])
    counted = _COUNTED.match(node["inter"])
    adapters, inter = (int(counted[1]), links[counted[2]]) if counted else (None, links[node["inter"]])
    return Node(
        name=node["name"],
        accelerator=accelerator,
        num_accelerators=count,
        intra=links[node["intra"]].link,
        inter=_per_accelerator(inter, adapters, count),
        domain_size=int(node["domain_size"]),
    )


def _per_accelerator(entry: _LinkEntry, adapters: int | None, gpus_per_node: int) -> Link:
    """The link as one accelerator has it, where a node has `adapters` of them (None: as is usual)."""
    if adapters is None and not entry.shared:
        return entry.link
    share = (adapters or 1) / gpus_per_node
    name = f"{adapters}x{entry.link.name}" if adapters else entry.link.name
    return replace(entry.link, name=name, bytes_per_second=entry.link.bytes_per_second * share)


def accelerators() -> tuple[str, ...]:
    """Names of the catalogue's accelerators."""
    return tuple(sorted(_catalog()[0]))


def links() -> tuple[str, ...]:
    """Names of the catalogue's links."""
    return tuple(_catalog()[2])


def find_node(name: str) -> Node:
    """The usual machine of an accelerator, by any of its spellings.

    Raises:
        InputError: unknown; names the nearest.

    >>> find_node("nvidia h100").accelerator.name, find_node("GB200").domain_size
    ('H100-80GB-SXM', 72)
    """
    nodes, names, _, _ = _catalog()
    found = names.get(_plain(name)) or _find_by_parts(name)
    if found is None:
        raise InputError(
            "this accelerator is not in the catalogue",
            field="cluster",
            got=name,
            allowed=_nearest(name, names, accelerators()),
            remedy="Take one of these spellings, or add a file to hardware/catalog",
        )
    return nodes[found]


def _find_by_parts(name: str) -> str | None:
    """The accelerator that an unlisted spelling means, by family, memory and mounting; None where there is none.

    What it leaves open is as in the family's usual member, for which the bare name, or that with its memory, stands.
    """
    nodes, names, _, _ = _catalog()
    said = _Parts.of(name)
    if said.family not in names and said.family.endswith("s"):
        said = replace(said, family=said.family.removesuffix("s"))  # `64 H100s`
    meant = [known for known in nodes if said.admits(_Parts.of(known))]
    usual = (names.get(said.family), names.get(_plain(f"{said.family} {said.memory or 0:g}gb")))
    return next((known for known in (*usual, *meant) if known in meant), None)


def find_accelerator(name: str) -> Accelerator:
    """An accelerator by any of its spellings; raises InputError with the nearest names."""
    return find_node(name).accelerator


def find_link(name: str, gpus_per_node: int) -> Link:
    """A link as one of a node's `gpus_per_node` accelerators has it; "4xib200" means four adapters a node.

    Raises:
        InputError: unknown; names the nearest.

    >>> find_link("4xib200", 8).bytes_per_second / 1e9, find_link("eth100", 4).bytes_per_second / 1e9
    (12.5, 3.125)
    """
    _, _, by_name, names = _catalog()
    counted = _COUNTED.match(name)
    adapters, word = (int(counted[1]), counted[2]) if counted else (None, name)
    found = names.get(_plain(word))
    if found is None or adapters == 0:
        raise InputError(
            "this link is not in the catalogue",
            field="link",
            got=name,
            allowed=_nearest(word, names, links()),
            remedy="Take one of these spellings, with the adapters a node has before it if need be: 4xib200",
        )
    return _per_accelerator(by_name[found], adapters, gpus_per_node)


def parse_cluster(
    text: str, *, nodes: int = 1, link: str | None = None, profile: MeasuredProfile | None = None, domain_size: int | None = None
) -> Cluster:
    """A cluster as the command line writes it.

    Args:
        text: `8xH100-80GB`: accelerators per node; the number may be left out, which takes the usual machine's.
        nodes: machines.
        link: between machines; default what is usual with this accelerator.
        profile: measured rates; its memory and memory bandwidth replace the catalogue's.
        domain_size: accelerators joined by the fast link; default a node's, or a rack's where the machine is a rack.

    Raises:
        InputError: an unknown accelerator or link (nearest names), or no machine at all.

    >>> cluster = parse_cluster("8xH100-80GB", nodes=4, link="ib400")
    >>> cluster.name, cluster.num_gpus, cluster.intra.name
    ('4 x 8xH100-80GB-SXM over ib400', 32, 'nvlink4')
    """
    counted = _COUNTED.match(text)
    node = find_node(counted[2] if counted else text)
    # Python converts no more than some thousand digits.
    count = int(counted[1][:_MOST_DIGITS]) if counted else node.num_accelerators
    usual_inter = node.inter if count == node.num_accelerators else _inter_for(node, count)
    domain = domain_size or (node.domain_size if node.domain_size > node.num_accelerators else count)
    accelerator = node.accelerator
    if profile is not None:
        accelerator = replace(
            accelerator, memory_bytes=profile.memory_bytes, memory_bytes_per_second=profile.memory_bytes_per_second
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
    """The usual outward link where a machine holds another number of accelerators than usual."""
    return find_link(node.inter.name, count) if count else node.inter


def _nearest(word: str, names: Mapping[str, str], known: Iterable[str]) -> str:
    close = difflib.get_close_matches(_plain(word), list(names), n=4, cutoff=0.5)
    found = dict.fromkeys(names[spelling] for spelling in close)
    return "nearest: " + ", ".join(found) if found else ", ".join(known)
