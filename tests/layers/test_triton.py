"""The Triton kernels, each time in a process of its own: Triton decides when it is imported whether it interprets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holonomy.ops.triton_support import TRITON

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not TRITON, reason="Triton is not installed")


def alone(arguments: list[str], **environment: str) -> str:
    # Newer releases ask to be told whether products and sums may be fused, as they always were.
    environment |= {"TRITON_DEFAULT_FP_FUSION": "1"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TRITON_"))}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=kept | environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def interpreted(device) -> dict[str, str]:
    return {"TRITON_INTERPRET": "1"} if device.type == "cpu" else {}


def test_kernels_mean_what_they_replace(device):
    """Under the suite's own checks of shapes, which must leave the kernels alone."""
    tests = "tests/layers/triton_kernels.py"
    said = alone(
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", tests, "--device", str(device)], **interpreted(device)
    )
    assert "passed" in said
    assert "skipped" not in said


FOR_GPUS = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from holonomy.ops.simplicial_attention import triton as triton_simplicial
simplicial = dict(TERMS=2, POWER=1, F=16, C=16, BLOCK=32)
kinds = {"reach": ("i32",) * 4, "tables": ("*fp32",) * 5 + ("*i32",) * 2, "incoming": ("*fp32",) * 3}
for capability, precision in ((80, "tf32"), (90, "ieee")):
    constants = simplicial | {"PRECISION": precision}
    known = kinds | {"sizes": ("i32",) * 8} | dict.fromkeys(constants, "constexpr")
    for kernel in triton_simplicial.KERNELS:
        names = kernel.arg_names
        signature = {name: known.get(name, "*fp32") for name in names}
        source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32))
        assert ("mma" in made.asm["ptx"]) == (precision == "tf32"), kernel  # never where float32 came in
        print(kernel.__name__, made.metadata.shared)
        assert made.metadata.shared <= 99 * 1024, kernel  # what a block may have on the smaller cards
"""


def test_kernels_compile_for_gpus_that_are_not_here(tmp_path):
    said = alone(["-c", FOR_GPUS], TRITON_CACHE_DIR=str(tmp_path))
    assert len(said.splitlines()) == 8
