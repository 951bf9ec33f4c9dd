"""Seconds of one optimizer step: compute, communication, and the pipeline that overlaps them."""
