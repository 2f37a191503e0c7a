"""The CPU layer where packages for GPUs are installed, as on a GPU host."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = """
from megatron_bridge.cpu_compat import install_cpu_compat

install_cpu_compat()
import torch
import megatron.core.models.gpt.gpt_model
import megatron.core.optimizer as optimizer
from slime_retool.trainer.core import Trainer

assert optimizer.Adam is torch.optim.AdamW, optimizer.Adam
"""


def test_the_cpu_takes_nothing_from_transformer_engine_where_that_is_installed(tmp_path: Path):
    package = tmp_path / "transformer_engine" / "pytorch"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("__version__ = '2.20.2'\n")
    (package / "__init__.py").write_text("")
    (package / "optimizers.py").write_text(
        "class FusedAdam: ...\nclass FusedSGD: ...\nmulti_tensor_applier = multi_tensor_l2norm = None\n"
        "multi_tensor_scale = multi_tensor_scale_tensor = None\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "CUDA_VISIBLE_DEVICES": "", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
