"""Shape of a model that runs through transformers' own class. Torch-free.

Our decoder does not support its family; `model.theirs` builds transformers' class. This value
has what the rest of the program needs: every parameter by name, the tied ones, and the module
that lists the blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardwright.architecture.adapters import adapted_parameters
from shardwright.architecture.parameters import ParameterSpec
from shardwright.architecture.shape import ModelShape

_BOOKKEEPING = (
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "_name_or_path",
    "use_cache",
    "auto_map",
)


@dataclass(frozen=True)
class ForeignShape(ModelShape):
    """Parameters and structure of a model of a transformers class.

    `specs` are the parameters in the order of the class, tied ones once; `ties` are pairs (tied
    name, name of the parameter with its values). `blocks` names the module that lists the
    blocks, `head` the projection to the vocabulary. With `plain_head` the logits are the head's
    product and nothing more, so the loss can be computed in chunks. `without_dropout`: the
    recipe disabled dropout. `code` is the folder whose Python code defines the class, if the
    recipe allows that.
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
        """List all parameters in the order of the class, adapters after their matrix.

        A tied parameter is listed once, under the name of the parameter it is tied to.
        """
        return (
            self.specs
            if self.adapters is None
            else tuple(adapted_parameters(self.specs, self.adapters, self.lies_in_out))
        )

    @property
    def tied(self) -> dict[str, str]:
        """Names that a checkpoint may omit -> the parameter that they are tied to."""
        return dict(self.ties)

    def told(self) -> dict[str, Any]:
        """Return the model's identity as JSON values; a resumed run must have the same."""
        config = {key: value for key, value in self.config.items() if key not in _BOOKKEEPING}
        return {
            "family": self.family,
            "class_name": self.class_name,
            "config": config,
            "without_dropout": self.without_dropout,
        }
