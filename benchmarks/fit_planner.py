"""Fit the planner's efficiencies to published measurements, and say how well they predict rows that they were not fitted on.

    python benchmarks/fit_planner.py --published FOLDER score            errors with the efficiencies that are in the package
    python benchmarks/fit_planner.py --published FOLDER fit              fit, and write planner/efficiencies.yaml
    python benchmarks/fit_planner.py --published FOLDER validate         fit without a source and predict it, source by source

FOLDER (default: $SHARDWRIGHT_PUBLISHED) holds measurements.csv and failures.csv. Every parameter has a cause that a person can
name: what an accelerator achieves, or how a trainer behaves; none belongs to a row or to a model. The search is by coordinates:
one number at a time is moved by a factor as long as that lowers the loss, with factors that shrink.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from shardwright.planner import achieved
from shardwright.planner.achieved import Efficiencies, load_efficiencies
from shardwright.planner.measurements import Case, configuration, read_case, read_rows
from shardwright.planner.published import predict_case
from shardwright.units import GIB_BYTES

FACTORS = (1.15, 1.08, 1.04)
MOST_ROWS = 100
"""Rows of one source that the search looks at, and no more than half: the others are held out."""


@dataclass(frozen=True)
class Parameter:
    """One number of `efficiencies.yaml`; `precision` for an entry of `matmul_share_by_precision`."""

    section: str
    name: str
    field: str
    low: float
    high: float
    precision: str = ""

    def get(self, efficiencies: Efficiencies, default: float) -> float:
        entry = (efficiencies.sections.get(self.section, {}).get(self.name) or {}).get(self.field)
        if self.precision:
            entry = (entry or {}).get(self.precision)
        return default if entry is None else float(entry)

    def put(self, efficiencies: Efficiencies, value: float) -> Efficiencies:
        stored: Any = float(f"{min(max(value, self.low), self.high):.4g}")
        if self.precision:
            entry = (efficiencies.sections.get(self.section, {}).get(self.name) or {}).get(self.field) or {}
            stored = {**entry, self.precision: stored}
        return efficiencies.with_value(self.section, self.name, self.field, stored)


@dataclass(frozen=True)
class Row:
    """A case with what was measured; `ran` False is a run that did not fit."""

    case: Case
    tokens_per_second: float | None
    memory_gib: float | None
    ran: bool

    @property
    def order(self) -> bytes:
        """A hash of the id: an order that is the same on every machine and has nothing to do with the row."""
        return hashlib.sha256(self.case.id.encode()).digest()


@dataclass(frozen=True)
class Errors:
    """Of one row: measured over predicted throughput less one (the error of the step time), memory, and whether `fits` is right."""

    time: float | None
    memory: float | None
    right: bool | None

    @property
    def loss(self) -> float:
        """What the search lowers: absolute errors, those of memory half again below -5%, and 0.5 for a wrong `fits`."""
        total = 0.0
        if self.time is not None:
            total += min(abs(self.time), 1.5)
        if self.memory is not None:
            total += min(abs(self.memory), 1.5) + (0.5 * (-0.05 - self.memory) if self.memory < -0.05 else 0.0)
        return total if self.right is None or self.right else total + 0.5


def number(text: str | None) -> float | None:
    return float(text) if text not in (None, "", "nan") else None


def load_rows(folder: Path) -> list[Row]:
    """All rows of both tables. Failures whose cause is unknown (nanotron's) teach nothing about memory and are left out."""
    rows = []
    for raw in read_rows(folder / "measurements.csv"):
        speed = number(raw["tokens_per_sec_per_gpu"]) or number(raw["derived_tokens_per_sec_per_gpu"])
        rows.append(Row(read_case(raw["id"], configuration(raw)), speed, number(raw["peak_memory_gib_per_gpu"]), True))
    for raw in read_rows(folder / "failures.csv"):
        if raw["source_group"] != "nanotron-ultrascale":
            rows.append(Row(read_case(raw["id"], configuration(raw)), None, None, False))
    return rows


METRICS = {"allocated": "live", "reserved": "reserved", "device": "total"}


def errors_of(row: Row, efficiencies: Efficiencies) -> Errors:
    """One row's errors under some efficiencies."""
    prediction = predict_case(row.case, efficiencies)
    predicted_gib = getattr(prediction.memory, METRICS[row.case.metric]) / GIB_BYTES
    speed = prediction.tokens_per_second_per_gpu
    judged = row.case.source in ("aleph-layouts", "litgpt", "bloom-prequel")
    return Errors(
        time=row.tokens_per_second / speed - 1 if row.tokens_per_second else None,
        memory=predicted_gib / row.memory_gib - 1 if row.memory_gib else None,
        right=prediction.fits == row.ran if judged else None,
    )


def split(rows: Iterable[Row]) -> tuple[list[Row], list[Row]]:
    """Rows that the fit looks at, and rows that it never does: of each source at most half, by a hash of the id."""
    chosen: dict[str, list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.order):
        chosen[row.case.source].append(row)
    fitted, held_out = [], []
    for found in chosen.values():
        most = min(MOST_ROWS, (len(found) + 1) // 2)
        fitted += found[:most]
        held_out += found[most:]
    return fitted, held_out


class Search:
    """Coordinate search over the parameters; a row is predicted anew only when a number that it reads has changed."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        per_source: dict[str, int] = defaultdict(int)
        for row in rows:
            per_source[row.case.source] += 1
        # Every source counts alike, but for the square root of its size: a source of five rows shall not outweigh one of hundreds.
        self.weights = [per_source[row.case.source] ** -0.5 for row in rows]
        self.readers: dict[tuple[str, str], list[int]] = defaultdict(list)
        for index, row in enumerate(rows):
            for key in names_read(row.case):
                self.readers[key].append(index)

    def losses(self, indices: Iterable[int], efficiencies: Efficiencies) -> dict[int, float]:
        return {index: self.weights[index] * errors_of(self.rows[index], efficiencies).loss for index in indices}

    def run(self, start: Efficiencies, parameters: Sequence[Parameter], passes: int, *, keep: Path | None = None) -> Efficiencies:
        """The efficiencies after so many passes over all parameters, fewer when nothing moves; `keep` is written after each."""
        best = start
        current = self.losses(range(len(self.rows)), best)
        for turn in range(passes):
            factor = FACTORS[min(turn, len(FACTORS) - 1)]
            moved = False
            for parameter in parameters:
                readers = self.readers.get((parameter.section, parameter.name), [])
                if not readers:
                    continue
                better, found = self._move(best, parameter, readers, factor, current)
                if better is not None:
                    best, moved = better, True
                    current |= found
            if keep is not None:
                print(f"pass {turn + 1}: loss {sum(current.values()):.3f}", flush=True)
                write(best, keep)
            if not moved and turn >= len(FACTORS):
                break
        return best

    def _move(
        self, best: Efficiencies, parameter: Parameter, readers: list[int], factor: float, current: dict[int, float]
    ) -> tuple[Efficiencies | None, dict[int, float]]:
        before = sum(current[index] for index in readers)
        value = parameter.get(best, self._value(parameter, readers, best))
        kept: tuple[Efficiencies | None, dict[int, float]] = (None, {})
        for direction in (factor, 1 / factor):
            tried = value
            while True:
                tried *= direction
                changed = parameter.put(best, tried)
                found = self.losses(readers, changed)
                after = sum(found.values())
                if after >= before - 1e-6:
                    break
                before, kept = after, (changed, found)
                if not parameter.low < tried < parameter.high:
                    break
            if kept[0] is not None:
                break
        return kept

    def _value(self, parameter: Parameter, readers: list[int], efficiencies: Efficiencies) -> float:
        """What the first reader has for it now: a default, or a value of a wider section."""
        case = self.rows[readers[0]].case
        value = getattr(efficiencies.of(case.cluster.accelerator, case.framework, case.features), parameter.field)
        if parameter.precision:
            value = value.get(parameter.precision, efficiencies.of(case.cluster.accelerator, case.framework).matmul_share)
        return float(value) or parameter.low or 0.05


def names_read(case: Case) -> list[tuple[str, str]]:
    """Entries of `efficiencies.yaml` that a case reads."""
    accelerator = case.cluster.accelerator
    return [
        ("accelerators", accelerator.generation),
        ("accelerators", accelerator.name),
        ("frameworks", case.framework),
        *(("features", feature) for feature in case.features),
    ]


def show(title: str, errors: dict[str, list[Errors]]) -> None:
    """A table in Markdown: per source, error of the step time and of memory."""
    print(f"\n{title}\n", flush=True)
    print("| source | rows | step time | bias | within 20% | memory rows | memory | bias | over 5% under | fits right |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for source, found in sorted(errors.items()):
        time = [error.time for error in found if error.time is not None]
        memory = [error.memory for error in found if error.memory is not None]
        right = [error.right for error in found if error.right is not None]
        cells = [source, str(len(time)), mean_of(time), bias_of(time), share(abs(x) <= 0.2 for x in time), str(len(memory))]
        cells += [mean_of(memory), bias_of(memory), share(x < -0.05 for x in memory), share(right)]
        print(f"| {' | '.join(cells)} |")


def mean_of(values: list[float]) -> str:
    return f"{100 * statistics.mean(map(abs, values)):.1f}%" if values else ""


def bias_of(values: list[float]) -> str:
    return f"{100 * statistics.median(values):+.1f}%" if values else ""


def share(hits: Iterable[bool]) -> str:
    found = list(hits)
    return f"{100 * sum(found) / len(found):.0f}%" if found else ""


def by_source(rows: Iterable[Row], efficiencies: Efficiencies) -> dict[str, list[Errors]]:
    found: dict[str, list[Errors]] = defaultdict(list)
    for row in rows:
        found[row.case.source].append(errors_of(row, efficiencies))
    return found


def validate(rows: list[Row], parameters: Sequence[Parameter], passes: int, sources: Iterable[str] = ()) -> None:
    """Errors on a source of which no row was looked at, a source at a time; what is found is printed as it comes."""
    left_out = {}
    for source in sources or sorted({row.case.source for row in rows}):
        fitted, _ = split(row for row in rows if row.case.source != source)
        efficiencies = Search(fitted).run(START, parameters, passes)
        found = by_source((row for row in rows if row.case.source == source), efficiencies)
        show(f"{source} held out", found)
        left_out |= found
    show("A whole source held out", left_out)


PACKAGED = Path(achieved.__file__).with_name("efficiencies.yaml")
HEADER = """\
# Fitted by benchmarks/fit_planner.py to published measurements; docs/planning-accuracy.md says to which, and how well.
"""


def write(efficiencies: Efficiencies, path: Path) -> None:
    """The file that the planner reads."""
    sections = {name: {key: dict(entry) for key, entry in section.items()} for name, section in efficiencies.sections.items()}
    path.write_text(HEADER + yaml.safe_dump(sections, sort_keys=True), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--published", type=Path, default=os.environ.get("SHARDWRIGHT_PUBLISHED"))
    parser.add_argument("--passes", type=int, default=8)
    parser.add_argument("--source", action="append", help="only rows of these sources; to validate: hold out only these")
    parser.add_argument("--out", type=Path, default=PACKAGED, help="what `fit` writes, after each pass")
    parser.add_argument("--from-defaults", action="store_true", help="begin at the defaults, not at the package's numbers")
    parser.add_argument("what", choices=("score", "fit", "validate"))
    options = parser.parse_args()
    if options.published is None:
        parser.error("say where the published measurements are: --published FOLDER, or SHARDWRIGHT_PUBLISHED")
    every = load_rows(options.published)
    if options.what == "validate":
        validate(every, PARAMETERS, options.passes, options.source or ())
        return
    rows = [row for row in every if not options.source or row.case.source in options.source]
    efficiencies = START if options.from_defaults else load_efficiencies()
    fitted, held_out = split(rows)
    if options.what == "fit":
        efficiencies = Search(fitted).run(efficiencies, PARAMETERS, options.passes, keep=options.out)
    show("Rows that were fitted", by_source(fitted, efficiencies))
    show("Rows that were held out", by_source(held_out, efficiencies))


GPU_FIELDS = {
    "matmul_share": (0.3, 0.95),
    "m_half": (64, 300),
    "attention_forward_share": (0.3, 0.75),
    "attention_backward_share": (0.25, 0.65),
    "memory_share": (0.6, 0.92),
    "intra_share": (0.4, 0.92),
    "inter_share": (0.2, 0.92),
}
"""What an accelerator and its links achieve, with the bounds of the search."""

TRAINER_FIELDS = {
    "host_seconds": (1e-6, 1e-3),
    "bytes_share": (0.4, 3.0),
    "data_overlap": (0.01, 1.0),
    "tensor_overlap": (0.01, 0.9),
    "step_seconds": (1e-3, 0.5),
    "straggler_share": (1e-4, 0.2),
    "reserve_share": (1e-3, 0.6),
    "reserve_bytes": (1e7, 8e9),
}
"""How a trainer keeps its device busy, and what its allocator holds."""

TRAINERS = ("nanotron", "megatron-core", "megatron-lm", "megatron-deepspeed", "aleph", "llm-foundry", "torchtitan", "litgpt")
OTHERS = (
    # The 500 W of one cluster, and a B200 that is kept below its power.
    Parameter("accelerators", "H100-96GB-SXM-HBM2e", "matmul_share", 0.1, 0.98),
    Parameter("accelerators", "H100-96GB-SXM-HBM2e", "matmul_share_by_precision", 0.1, 0.98, "fp8"),
    Parameter("features", "power_limited", "matmul_share", 0.1, 0.98),
    Parameter("features", "power_limited", "matmul_share_by_precision", 0.1, 0.98, "fp8"),
    # Hosts differ with the machine: Grace starts operations more slowly than x86.
    *(
        Parameter("accelerators", name, "host_seconds", 2e-6, 6e-5)
        for name in ("Hopper", "B200-180GB-SXM", "B300-270GB-SXM", "GB200-186GB", "GB300-279GB")
    ),
    # Sparse layers, by release of NeMo: grouped products, permutation and graphs came one after another.
    Parameter("frameworks", "megatron-core", "sparse_operations", 1.0, 6.0),
    *(Parameter("features", f"nemo-{release}", "sparse_operations", 1.0, 25.0) for release in ("25.09", "25.11", "26.02")),
    Parameter("frameworks", "megatron-core", "expert_overlap", 0.01, 0.95),
    Parameter("frameworks", "megatron-core", "expert_share", 0.3, 1.0),
    *(
        Parameter("features", f"nemo-{release}", "expert_share", 0.3, 1.0)
        for release in ("25.09", "25.11", "26.02", "26.04", "26.06", "26.08")
    ),
    # The kernels of 2023 on the first H100.
    Parameter("features", "llm-foundry on Hopper", "matmul_share", 0.3, 0.95),
    Parameter("features", "llm-foundry on Hopper", "matmul_share_by_precision", 0.1, 0.95, "fp8"),
    Parameter("features", "llm-foundry on Hopper", "attention_forward_share", 0.15, 0.75),
    Parameter("features", "llm-foundry on Hopper", "attention_backward_share", 0.1, 0.65),
    # PyTorch's attention on Hopper is FlashAttention-2; NeMo's is cuDNN's, which was written for it.
    Parameter("features", "torchtitan on Hopper", "attention_forward_share", 0.15, 0.75),
    Parameter("features", "torchtitan on Hopper", "attention_backward_share", 0.1, 0.65),
    # Attention with sinks has no kernel as good as plain attention's.
    Parameter("features", "attention_sinks", "attention_forward_share", 0.02, 0.75),
    Parameter("features", "attention_sinks", "attention_backward_share", 0.02, 0.65),
    # Asynchronous tensor parallelism, and scaling by row, which costs more than by tensor.
    Parameter("features", "async_tp", "tensor_overlap", 0.01, 0.99),
    Parameter("features", "rowwise", "matmul_share_by_precision", 0.1, 0.98, "fp8"),
    # Attention kernels that aleph-layouts compares, and a fused norm beside them.
    *(
        Parameter("features", kernel, field, low, high)
        for kernel in ("flash_attention2", "flash_attentionv1.0.8", "flash_attention2 + RMS kernel", "fused", "torch")
        for field, low, high in (
            ("attention_forward_share", 0.2, 0.75),
            ("attention_backward_share", 0.15, 0.65),
            ("bytes_share", 0.4, 4.0),
        )
    ),
    # aleph's tensor parallelism sums twice a block without overlap, over what its links then reach.
    Parameter("frameworks", "aleph", "intra_share", 0.1, 0.92),
    Parameter("frameworks", "aleph", "collective_seconds", 5e-6, 1e-3),
    # nanotron's cluster: rings over EFA, alone and beside a pipeline, and what a micro-batch waits on 512 GPUs.
    Parameter("frameworks", "nanotron", "hop_seconds", 1e-6, 1e-3),
    Parameter("frameworks", "nanotron", "pipelined_hop_seconds", 1e-6, 5e-3),
    Parameter("frameworks", "nanotron", "congestion_seconds", 1e-3, 5.0),
    Parameter("frameworks", "nanotron", "collective_seconds", 2e-6, 5e-2),
)


def _parameters() -> tuple[Parameter, ...]:
    found = []
    for generation in ("Volta", "Ampere", "Hopper", "Blackwell", "Blackwell Ultra"):
        found += [Parameter("accelerators", generation, field, low, high) for field, (low, high) in GPU_FIELDS.items()]
        for precision in ("fp8", "nvfp4") if generation in ("Hopper", "Blackwell", "Blackwell Ultra") else ():
            found.append(Parameter("accelerators", generation, "matmul_share_by_precision", 0.1, 0.98, precision))
    for trainer in TRAINERS:
        found += [
            Parameter("frameworks", trainer, field, low, high)
            for field, (low, high) in TRAINER_FIELDS.items()
            if (trainer, field) != ("megatron-core", "host_seconds")
        ]
    return (*found, *OTHERS)


PARAMETERS = _parameters()
NANOTRON = {
    "congested_gpus": 512,
    "congestion_seconds": 0.8,
    "pipelined_hop_seconds": 3e-4,
    "hop_seconds": 5e-5,
    "host_seconds": 7e-5,
}
LATENT = {"latent_experts": {"expert_overlap": 0.75}}  # three quarters of the traffic that the shape would have are not sent
START = Efficiencies({"accelerators": {}, "frameworks": {"nanotron": NANOTRON}, "features": LATENT})
"""Where every fit begins: the defaults of `Efficiency`, and what single rows of nanotron's table show at a glance."""

if __name__ == "__main__":
    main()
