"""Packaging of slime-retool. `pip install -e ".[gpu]"` is the whole set-up on a GPU host; see README.md for the CPU."""

from __future__ import annotations

import runpy
from pathlib import Path

from setuptools import find_packages, setup

REQUIRES = [
    "torch",
    "transformers>=5",
    'megatron-core==0.16.1; python_version < "3.12"',
    'megatron-core>=0.19.2,<0.20; python_version >= "3.12"',
    "ray[default]",
    "datasets",
    "pandas",
    "pyarrow",
    "aiohttp",
    "orjson",
    "pybase64",
    "msgspec",
    "wandb",
    "prometheus-client",
    "tensorboard",
    "safetensors",
    "tqdm",
    "psutil",
    "numpy",
    "scipy",
    "math-verify",
    "matplotlib",
    "jsonschema",
    "sglang-router==0.3.2",
]
EXTRAS = {
    # SGLang pins torch and transformers; taking it whole also brings its GPU kernels.
    "gpu": ["sglang==0.5.15.post1"],
    "te": ["transformer-engine[pytorch]>=2.20"],
    "dev": ["pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "hypothesis", "ruff", "mypy"],
    # Beside a Chromium of the system (`apt install chromium`), or `playwright install chromium`.
    "browser": ["playwright", "axe-playwright-python"],
}

PACKAGE = runpy.run_path(str(Path(__file__).with_name("slime_retool") / "__init__.py"))

setup(
    name="slime-retool",
    version=PACKAGE["__version__"],
    description=PACKAGE["__doc__"],
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10,<3.14",
    packages=find_packages(include=["slime_retool*", "megatron_bridge*"]),
    package_data={"slime_retool": ["py.typed", "commands/viewer/assets/*"], "megatron_bridge": ["py.typed"]},
    data_files=[("share/slime-retool/models", sorted(map(str, Path("scripts/models").glob("*.sh"))))],
    install_requires=REQUIRES,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["slime-retool=slime_retool.cli:main"]},
)
