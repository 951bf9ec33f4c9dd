"""A recipe as a job: nodes, ranks, the arguments of `train`, environment, and submission."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shardwright.cluster.scheduler_variables import SchedulerVariables
from shardwright.config import Recipe
from shardwright.errors import ExitCode, InputError, RunFailed
from shardwright.hardware.catalog_loading import parse_cluster
from shardwright.masking import mask_secrets
from shardwright.plans import resolve_degrees

_VARIABLE_PLACEHOLDER = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_VARIABLE_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
_UNSAFE_IN_NAMES = re.compile(r"[^A-Za-z0-9._=+-]")


@dataclass(frozen=True)
class NetworkOptions:
    """Network interface that connects the nodes, and InfiniBand adapters."""

    interface: str | None = None
    infiniband_adapters: str | None = None
    is_infiniband_enabled: bool = True

    def build_environment(self) -> dict[str, str]:
        """Return variables of NCCL and gloo for explicit options only; both detect the rest.

        >>> NetworkOptions(interface="eth0", is_infiniband_enabled=False).build_environment()
        {'GLOO_SOCKET_IFNAME': 'eth0', 'NCCL_SOCKET_IFNAME': 'eth0', 'NCCL_IB_DISABLE': '1'}
        """
        variables: dict[str, str] = {}
        if self.interface is not None:
            variables |= {
                "GLOO_SOCKET_IFNAME": self.interface,
                "NCCL_SOCKET_IFNAME": self.interface,
            }
        if self.infiniband_adapters is not None:
            variables["NCCL_IB_HCA"] = self.infiniband_adapters
        if not self.is_infiniband_enabled:
            variables["NCCL_IB_DISABLE"] = "1"
        return variables


@dataclass(frozen=True)
class Sweep:
    """Values of one recipe key; each is a run of its own.

    >>> Sweep.parse("training.learning_rate=1e-3,3e-4").list_folder_names()
    ['training.learning_rate=1e-3', 'training.learning_rate=3e-4']
    """

    key: str
    values: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Sweep:
        """Parse `KEY=VALUE,VALUE,...`.

        Raises:
            InputError: no key, a value that is missing, or values that would share a folder.
        """
        key, equals, values = text.partition("=")
        sweep = cls(key.strip(), tuple(value.strip() for value in values.split(",")))
        names = sweep.list_folder_names()
        if not equals or not sweep.key or not all(sweep.values) or len(set(names)) < len(names):
            raise InputError(
                "not a recipe key with different values",
                field="--sweep",
                got=text,
                allowed="KEY=VALUE,VALUE,... e.g. training.learning_rate=1e-3,3e-4",
            )
        return sweep

    def list_assignments(self) -> list[str]:
        """List `KEY=VALUE`, one per value."""
        return [f"{self.key}={value}" for value in self.values]

    def list_folder_names(self) -> list[str]:
        """List the names of the runs' folders, one per value."""
        return [_UNSAFE_IN_NAMES.sub("_", assignment) for assignment in self.list_assignments()]


@dataclass(frozen=True)
class Job:
    """A recipe on `num_nodes` machines with `ranks_per_node` ranks each.

    Each rank uses one accelerator, unless `run.device` is the CPU.
    """

    recipe: Recipe
    recipe_path: str
    num_nodes: int
    ranks_per_node: int
    overrides: tuple[str, ...] = ()
    layout: str | None = None
    run_dir: str | None = None
    network: NetworkOptions = NetworkOptions()
    environment: Mapping[str, str] = field(default_factory=dict)
    save_seconds: int = 300
    """Seconds before the time limit at which ranks are signalled; enough for a step and a save."""
    cores_per_rank: int | None = None
    port: int | None = None
    sweep: Sweep | None = None
    """Key of the recipe that differs between the tasks of a job array; only for Slurm."""

    def __post_init__(self) -> None:
        """Refuse degrees and batches that do not fit the ranks, before the job is queued."""
        if self.network.infiniband_adapters is not None and not self.network.is_infiniband_enabled:
            raise InputError(
                "InfiniBand adapters are named but InfiniBand is disabled",
                field="--ib-hca",
                got=self.network.infiniband_adapters,
                remedy="Leave out one of --ib-hca and --no-infiniband",
            )
        locations = [*self.overrides]
        if self.sweep is not None and self.recipe.checkpoint.dir is not None:
            locations.append(f"checkpoint.dir={self.recipe.checkpoint.dir}")
        for location in locations:
            if mask_secrets(location) != location:
                raise InputError(
                    "this value contains credentials, which would be written to the script",
                    field="--set",
                    got=location,
                    remedy="Put the URL into the recipe, with ${NAME} for the credentials; a sweep "
                    "needs a checkpoint.dir without credentials",
                )
        if self.recipe.elastic.spare_nodes >= self.num_nodes:
            raise InputError(
                "all nodes are spare nodes, so none is left for the ranks",
                field="elastic.spare_nodes",
                got=self.recipe.elastic.spare_nodes,
                allowed=f"at most {self.num_nodes - 1}",
                remedy="Raise --nodes, which counts the spare nodes too",
            )
        if not self.recipe.layout.auto:
            resolve_degrees(self.recipe, self.world_size)

    @property
    def world_size(self) -> int:
        """Number of ranks on all nodes except spare nodes."""
        return (self.num_nodes - self.recipe.elastic.spare_nodes) * self.ranks_per_node

    @property
    def keeps_processes(self) -> bool:
        """True if one process per node starts the ranks there, and outlives the loss of a node."""
        return self.recipe.elastic.warm_restarts

    @property
    def run_folder(self) -> str:
        """Folder of the run, or with a sweep of its runs' folders."""
        return self.run_dir or self.recipe.run.dir or f"runs/{self.recipe.name}"

    @property
    def has_accelerators(self) -> bool:
        """True if each rank needs an accelerator, as with `run.device: auto`."""
        return self.recipe.run.device != "cpu"

    @property
    def max_restarts(self) -> int:
        """Maximum number of restarts after the loss of a rank or node: `elastic.max_restarts`.

        The launcher performs them.
        """
        return self.recipe.elastic.max_restarts

    def build_train_arguments(self) -> list[str]:
        """Return `train RECIPE` and its options, without `--resume` and `--resume-if-begun`."""
        arguments = ["train", self.recipe_path]
        if self.keeps_processes:
            arguments += ["--nproc", str(self.ranks_per_node)]
        for override in self.overrides:
            arguments += ["--set", override]
        if self.layout is not None:
            arguments += ["--layout", self.layout]
        if self.run_dir is not None:
            arguments += ["--run-dir", self.run_dir]
        return arguments

    def build_environment(self) -> dict[str, str]:
        """Return the variables exported on every node; explicit ones override the others."""
        threads = str(self.cores_per_rank or 1)
        debug = {"NCCL_DEBUG": "WARN"} if self.has_accelerators else {}
        return {
            "OMP_NUM_THREADS": threads,
            **debug,
            **self.network.build_environment(),
            **self.environment,
        }

    def list_warnings(self) -> list[str]:
        """Return warnings about recipe settings that a launcher changes or ignores."""
        warnings = []
        if self.recipe.elastic.min_ranks is not None and not self.keeps_processes:
            warnings.append(
                "elastic.min_ranks has no effect: every restart uses all nodes, except with "
                "elastic.warm_restarts"
            )
        if self.num_nodes > 1 and not self.max_restarts:
            warnings.append("elastic.max_restarts is 0: the loss of a rank or node ends the run")
        if self.num_nodes > 1 and self.network.interface is None and not self.has_accelerators:
            warnings.append(
                "gloo uses the address to which the hostname resolves; "
                "if that is 127.0.x.1, set --interface"
            )
        return warnings


def build_overrides(overrides: Iterable[str], run_dir: str | None) -> list[str]:
    """Return the overrides of recipe keys, with that of `run.dir` if a run folder is given."""
    return [*overrides, *([] if run_dir is None else [f"run.dir={json.dumps(run_dir)}"])]


def build_loss_limit(job: Job, scheduler: SchedulerVariables) -> list[str]:
    """Return the lines that count lost ranks and nodes, and end a job that lost too many."""
    job_id = scheduler.launch[0]
    restarts = scheduler.restarts
    return [
        "# Restarts that did not follow a save are losses. The scheduler requeues after the loss",
        "# of a node by itself, so they are counted here, not where the script requeues.",
        f'saves={shlex.quote(job.recipe.name)}-"${job_id}".saves',
        'touch "$saves"',
        f'losses=$((${{{restarts}:-0}} - $(wc -l < "$saves")))',
        f'if [ "$losses" -gt {job.max_restarts} ]; then',
        f'  echo "shardwright: a rank or node was lost $losses times; '
        f'elastic.max_restarts is {job.max_restarts}" >&2',
        f"  exit {ExitCode.RUN_FAILED:d}",
        "fi",
    ]


def count_ranks_per_node(recipe: Recipe, num_gpus: int | None, num_ranks: int | None) -> int:
    """Return the ranks per node: one per GPU; on CPUs as many as `--ranks-per-node` says.

    Args:
        recipe: Recipe whose `cluster` states the GPUs of a node if no option does.
        num_gpus: Option `--gpus-per-node`.
        num_ranks: Option `--ranks-per-node`.

    Raises:
        InputError: the options contradict each other, or neither they nor the recipe state it.
    """
    if recipe.run.device != "cpu" and num_ranks is not None:
        raise InputError(
            "each rank uses one GPU",
            field="--ranks-per-node",
            got=num_ranks,
            remedy="Set --gpus-per-node instead, or to 0 for ranks on CPUs",
        )
    if num_gpus and num_ranks not in (None, num_gpus):
        raise InputError(
            "contradictory numbers of ranks per node",
            field="--ranks-per-node",
            got=f"{num_ranks} with --gpus-per-node {num_gpus}",
            remedy="Set --gpus-per-node 0: the recipe trains on CPUs",
        )
    if num_gpus is not None or num_ranks is not None:
        return num_gpus or num_ranks or 1
    if recipe.cluster is None:
        raise InputError(
            "the number of ranks per node is unknown",
            field="--gpus-per-node",
            remedy="Set it, or name the node type in the recipe (`cluster: 8xH100-80GB`)",
        )
    return parse_cluster(recipe.cluster.node).gpus_per_node


def parse_environment(assignments: Iterable[str]) -> dict[str, str]:
    """Parse `NAME=VALUE` arguments into a mapping.

    >>> parse_environment(["HF_HOME=/scratch/hf"])
    {'HF_HOME': '/scratch/hf'}

    Raises:
        InputError: An entry is not NAME=VALUE.
    """
    variables = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals or not _VARIABLE_NAME.match(name):
            raise InputError(
                "not an environment variable", field="--env", got=assignment, allowed="NAME=VALUE"
            )
        variables[name] = value
    return variables


def find_placeholders(text: str) -> set[str]:
    """Return the names of the environment variables that a recipe reads.

    >>> sorted(find_placeholders("sources: ${DATA}/text"))
    ['DATA']
    """
    return set(_VARIABLE_PLACEHOLDER.findall(text))


def build_export_lines(variables: Mapping[str, str]) -> list[str]:
    """Return a line of shell for each variable."""
    return [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]


def submit_job(command: Sequence[str], text: str) -> str:
    """Pass the text to a scheduler's command; return its reply: the job id from Slurm.

    Raises:
        InputError: the command is not installed.
        RunFailed: the command failed; contains its message.
    """
    if shutil.which(command[0]) is None:
        raise InputError(
            f"{command[0]} is not installed on this machine",
            field="--submit",
            remedy=f"Write the file with --out FILE and submit it on a machine with {command[0]}",
        )
    result = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RunFailed(
            f"{command[0]} failed: "
            f"{result.stderr.strip() or result.stdout.strip() or f'status {result.returncode}'}"
        )
    return result.stdout.strip()
