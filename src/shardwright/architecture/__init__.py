"""Model shapes read from config.json, with parameters by name and counts. Torch-free."""

from shardwright.architecture.adapters import AdapterShape
from shardwright.architecture.cut import cut
from shardwright.architecture.experts import ExpertShape
from shardwright.architecture.families import FAMILIES
from shardwright.architecture.foreign import ForeignShape
from shardwright.architecture.latent import LatentShape
from shardwright.architecture.parameters import (
    ByClass,
    FilePiece,
    Init,
    Normal,
    Ones,
    ParameterSpec,
    Role,
    RowNorms,
    Uniform,
    Zeros,
)
from shardwright.architecture.reading import INERT_FIELDS, OFF_FIELDS, read_config, read_content
from shardwright.architecture.recipe import shape_of
from shardwright.architecture.shape import Activation, LayerShape, ModelShape, RopeShape

__all__ = [
    "FAMILIES",
    "INERT_FIELDS",
    "OFF_FIELDS",
    "Activation",
    "AdapterShape",
    "ByClass",
    "ExpertShape",
    "FilePiece",
    "ForeignShape",
    "Init",
    "LatentShape",
    "LayerShape",
    "ModelShape",
    "Normal",
    "Ones",
    "ParameterSpec",
    "Role",
    "RopeShape",
    "RowNorms",
    "Uniform",
    "Zeros",
    "cut",
    "read_config",
    "read_content",
    "shape_of",
]
