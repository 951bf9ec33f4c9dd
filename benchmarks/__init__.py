"""Measurements of shardwright beside what people use today; every number is made by a command named
in the README.
"""
