"""shardwright: plan, prove and train large language models over any number of devices."""

__version__ = "0.1.0"
