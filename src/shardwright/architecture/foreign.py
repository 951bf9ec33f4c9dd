"""A model of a family that our decoder does not know: what can be said of it without knowing its function. Torch-free.

Its function is that of transformers' own class, which `model.theirs` builds. This value carries what everybody else asks for: every
parameter by name, which of them are one and the same, and where the blocks lie.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardwright.architecture.adapters import adapted_parameters
from shardwright.architecture.parameters import ParameterSpec
from shardwright.architecture.shape import ModelShape

_BOOKKEEPING = ("architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "use_cache", "auto_map")


@dataclass(frozen=True)
class ForeignShape(ModelShape):
    """What is known of a foreign model.

    `specs` are its parameters in the order of its class, tied ones once; `ties` are pairs (name, the parameter that it is).
    `blocks` names the module that lists the blocks, `head` the one that projects to the vocabulary. `plain_head` says that the
    logits are the head's product and nothing more, so that they need never exist all at once. `without_dropout`: the recipe
    switched it off. `code` is the folder whose own Python code makes the class, where the recipe allows that.
    """

    specs: tuple[ParameterSpec, ...] = ()
    ties: tuple[tuple[str, str], ...] = ()
    class_name: str = ""
    blocks: str = ""
    head: str = ""
    plain_head: bool = False
    without_dropout: bool = False
    code: str | None = None

    def parameters(self) -> tuple[ParameterSpec, ...]:
        """Every parameter in the class's order, tied ones once under their owner's name; adapters behind their matrix."""
        return self.specs if self.adapters is None else tuple(adapted_parameters(self.specs, self.adapters, self.lies_in_out))

    @property
    def tied(self) -> dict[str, str]:
        """Names that a checkpoint may leave out because another parameter is them -> that parameter's name."""
        return dict(self.ties)

    def told(self) -> dict[str, Any]:
        """What makes it this model, as JSON; a resumed run has it in common with the run that saved."""
        config = {key: value for key, value in self.config.items() if key not in _BOOKKEEPING}
        return {"family": self.family, "class_name": self.class_name, "config": config, "without_dropout": self.without_dropout}
