"""Parts that launchers share: their description, and options of the command line."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from shardwright.cluster.job import Job

OptionalText = str | None


def build_option(name: str, help_text: str, metavar: str | None = None, **limits: Any) -> Any:
    """Build an option of the command line whose default is not shown."""
    return typer.Option(name, metavar=metavar, help=help_text, show_default=False, **limits)


Image = Annotated[
    OptionalText, build_option("--image", "Container image; on Slurm it needs Pyxis.")
]


@dataclass(frozen=True)
class Launcher:
    """Builder of a job's text, and the options that only this launcher has."""

    output: str
    """Text that the subcommand prints; completes `Print ...` in its help."""
    options: type[Any]
    """Frozen dataclass of the launcher's own options. Each field is annotated with a typer option
    and may be omitted; a flag has the name of its field."""
    build: Callable[[Job, Any], str]
    """Function from a job and the options to the text."""
    list_warnings: Callable[[Job, Any], list[str]] | None = None
    """Function from a job and the options to warnings about them."""
    submit_command: tuple[str, ...] = ()
    """Command that reads the text from standard input; empty without a scheduler."""
    exports_shell: bool = False
    """True if the job gets the variables of the submitting shell."""
    keeps_processes: bool = False
    """True if it can start a process per node that outlives the loss of a rank
    (`elastic.warm_restarts`)."""

    def list_parameters(self) -> list[inspect.Parameter]:
        """Return the launcher's own options as keyword parameters of a command."""
        own = inspect.signature(self.options, eval_str=True).parameters.values()
        return [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in own]

    def build_text(self, job: Job, values: Mapping[str, Any]) -> tuple[str, list[str]]:
        """Return the text of a job and warnings about the values of the launcher's options."""
        options = self.options(**values)
        warnings = self.list_warnings(job, options) if self.list_warnings else []
        return self.build(job, options), warnings
