"""Tests in `on_device` need the device; `test_sessions.py` starts the sessions that have it."""

from tests.hostcuda.device import is_active

collect_ignore = [] if is_active() else ["on_device"]
