"""Audit of any PyTorch trainer: a recorded step compared with one process, and a diagnosis."""

from shardwright.audit.recorder import Recorder, ShardBox, ShardInfo

__all__ = ["Recorder", "ShardBox", "ShardInfo"]
