"""Run GPU kernels where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run_in_interpreter(script: str) -> None:
    """Run a script, which must end by printing "equal", with Triton's interpreter in place of its compiler."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=240)
    assert done.stdout == "equal\n", done.stderr
