"""The light packages import where torch, megatron, sglang, ray and transformers do not exist."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIGHT = (
    "types", "errors", "protocols", "run_folder", "metrics", "metric_table", "config", "chat", "data", "tool_use",
    "sandbox", "reward", "rollout", "recipes", "commands",
)  # fmt: skip
HEAVY = ("torch", "megatron", "sglang", "ray", "transformers", "transformer_engine")

BLOCKED_IMPORT = """
import importlib, importlib.abc, sys

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {heavy!r}:
            raise ImportError(f"{{name}} is blocked in this test")

sys.meta_path.insert(0, Block())
for name in {modules!r}:
    importlib.import_module(name)
loaded = sorted(set(m.split(".")[0] for m in sys.modules) & set({heavy!r}))
assert not loaded, loaded
"""


def modules_of(package: str) -> list[str]:
    folder = ROOT / "slime_retool" / package
    if folder.with_suffix(".py").exists():
        return [f"slime_retool.{package}"]
    names = [info.name for info in pkgutil.walk_packages([str(folder)], f"slime_retool.{package}.")]
    return [f"slime_retool.{package}", *names]


def import_without_heavy_packages(modules: list[str]) -> subprocess.CompletedProcess[str]:
    code = BLOCKED_IMPORT.format(heavy=HEAVY, modules=modules)
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)


def test_light_packages_import_without_the_heavy_ones():
    modules = [name for package in LIGHT for name in modules_of(package)]
    done = import_without_heavy_packages(modules)
    assert done.returncode == 0, done.stderr


def test_recipe_hooks_import_without_the_heavy_packages():
    code = "import sys; sys.path.insert(0, 'examples/retool')\n" + BLOCKED_IMPORT.format(
        heavy=HEAVY, modules=["generate_with_retool", "tool_sandbox"]
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("heavy", HEAVY[:2])
def test_the_block_works(heavy: str):
    """The proof above would be empty if a blocked package could still be imported."""
    done = import_without_heavy_packages([heavy])
    assert done.returncode != 0 and "blocked in this test" in done.stderr
