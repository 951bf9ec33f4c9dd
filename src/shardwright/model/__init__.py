"""Configurable decoder with the parameter names and shapes of Hugging Face files."""

from shardwright.model.attention.kv_cache import KeyValueCache
from shardwright.model.block import Block
from shardwright.model.decoder import Decoder
from shardwright.model.dropout import DropoutKey
