"""Shape of a model that runs through transformers' own class. Torch-free.

Our decoder does not support its family; `model.hf.hf_model` builds transformers' class. This value
has what the rest of the program needs: every parameter by name, the tied ones, and the module
that lists the blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardwright.architecture.adapter_shape import add_adapter_parameters
from shardwright.architecture.model_shape import ModelShape
from shardwright.architecture.parameter_spec import ParameterSpec

_BOOKKEEPING_FIELDS = (
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "_name_or_path",
    "use_cache",
    "auto_map",
)


@dataclass(frozen=True)
class HFShape(ModelShape):
    """Parameters and structure of a model of a transformers class.

    `specs` are the parameters in the order of the class, tied ones once; `tied_pairs` are pairs
    (tied name, name of the parameter with its values). `blocks_module` names the module that lists
    the blocks, `head_module` the projection to the vocabulary. With `has_plain_head` the logits are
    the head's product and nothing more, so the loss can be computed in chunks.
    `is_dropout_disabled`: the recipe disabled dropout. `code_folder` is the folder whose Python
    code defines the class, if the recipe allows that.
    """

    specs: tuple[ParameterSpec, ...] = ()
    tied_pairs: tuple[tuple[str, str], ...] = ()
    class_name: str = ""
    blocks_module: str = ""
    head_module: str = ""
    has_plain_head: bool = False
    is_dropout_disabled: bool = False
    code_folder: str | None = None

    def list_parameters(self) -> tuple[ParameterSpec, ...]:
        """List all parameters in the order of the class, adapters after their matrix.

        A tied parameter is listed once, under the name of the parameter it is tied to.
        """
        return (
            self.specs
            if self.adapters is None
            else tuple(add_adapter_parameters(self.specs, self.adapters, self.is_in_out))
        )

    @property
    def tied_names(self) -> dict[str, str]:
        """Names that a checkpoint may omit -> the parameter that they are tied to."""
        return dict(self.tied_pairs)

    def describe_identity(self) -> dict[str, Any]:
        """Return the model's identity as JSON values; a resumed run must have the same."""
        config = {
            key: value for key, value in self.config.items() if key not in _BOOKKEEPING_FIELDS
        }
        return {
            "family": self.family,
            "class_name": self.class_name,
            "config": config,
            "without_dropout": self.is_dropout_disabled,
        }
