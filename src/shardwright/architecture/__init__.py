"""Model shapes read from config.json, with parameters by name and counts. Torch-free."""

from shardwright.architecture.adapter_shape import AdapterShape
from shardwright.architecture.config_reading import (
    INERT_FIELDS,
    OFF_FIELDS,
    read_config,
    read_content,
    read_recipe_shape,
)
from shardwright.architecture.expert_shape import ExpertShape
from shardwright.architecture.families import MODEL_FAMILIES
from shardwright.architecture.hf_shape import HFShape
from shardwright.architecture.latent_shape import LatentShape
from shardwright.architecture.model_shape import Activation, LayerShape, ModelShape, RopeShape
from shardwright.architecture.parameter_spec import (
    HFClassInit,
    NormalInit,
    OnesInit,
    ParameterInit,
    ParameterRole,
    ParameterSpec,
    RowNormsInit,
    UniformInit,
    WeightFileSlice,
    ZerosInit,
)
