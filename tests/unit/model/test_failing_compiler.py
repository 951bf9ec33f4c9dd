"""A compiler that fails, in processes of their own: torch leaves the evaluation of Python's frames
on where a compilation raises an error."""

from __future__ import annotations

import re
import sys

from tests import forked

FAILING = """
import torch
from shardwright.errors import RunFailed
from shardwright.model.pointwise import functions, operators

def fail(_graph, _inputs):
    raise NotImplementedError("no kernel for this")

operators.choose_compile_options = lambda: {"backend": fail}
try:
    functions.normalise_rms(torch.ones(4, 40), torch.ones(40), 1e-5)
except RunFailed as error:
    print(error)
"""


def test_a_compiler_that_fails_is_an_error_with_the_key() -> None:
    done = forked.run([sys.executable, "-c", FAILING], capture_output=True, text=True, timeout=120)
    assert re.search(r"normalise_rms: .*Set model\.fused_pointwise: none", done.stdout), done
