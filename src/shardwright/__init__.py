"""shardwright: plan, verify and train large language models on any number of devices."""

__version__ = "0.1.0"
