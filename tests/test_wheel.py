"""What `pip install` puts on a machine without the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BUILT_FROM = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "slime_retool", "megatron_bridge", "scripts")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy: a build leaves folders beside its sources."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in BUILT_FROM:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source)
    command = ["pip", "wheel", ".", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(out)]
    done = subprocess.run([sys.executable, "-m", *command], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [built] = out.glob("*.whl")
    return built


def test_the_wheel_holds_every_module_the_recipes_hooks_and_the_model_scripts(wheel: Path):
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = [path for package in ("slime_retool", "megatron_bridge") for path in (ROOT / package).rglob("*.py")]
    assert {str(path.relative_to(ROOT)) for path in modules} <= names
    assert "slime_retool/recipes/retool/generate_with_retool.py" in names
    scripts = {Path(name).name for name in names if "/data/share/slime-retool/models/" in name}
    assert scripts == {path.name for path in (ROOT / "scripts" / "models").glob("*.sh")}


def test_commands_and_hooks_run_from_the_wheel_alone(wheel: Path, tmp_path: Path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        "import slime_retool, slime_retool.recipes.retool.generate_with_retool as hooks; print(slime_retool.__file__)\n"
        "from slime_retool.cli import main; main(['convert', 'to-megatron', '--help'])"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.startswith(str(tmp_path / "site")), done.stderr
    assert "usage: slime-retool convert to-megatron" in done.stdout
