"""Run a module with the device: `python -m tests.hostcuda -m shardwright rehearse RECIPE ...`."""

import runpy
import sys

from tests.hostcuda.device import activate

if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] != "-m":
        sys.exit("usage: python -m tests.hostcuda -m MODULE [ARGUMENT ...]")
    activate()
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
