"""Measurements of shardwright and of what people use today; every number is made by a command named
in the README.
"""
