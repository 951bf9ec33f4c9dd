"""Import this module to give the process the device; torch must not be imported yet."""

from tests.hostcuda.device import activate

activate()
