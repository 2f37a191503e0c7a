"""A run's driver whose engine is a family of processes that starts in no time: `ray_driver.py OUTPUT_DIR` says "ready".

Child, and grandchild in a session of its own, as SGLang's scheduler and detokenizer are below its server.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import ray

from slime_retool.cluster import engines
from slime_retool.cluster.connection import connect
from slime_retool.cluster.placement import place
from slime_retool.config import Config
from slime_retool.engine.process import SupervisedProcess

FAMILY = """
import subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
subprocess.Popen(sleep)
subprocess.Popen(sleep, start_new_session=True)
print("ready", flush=True)
time.sleep(600)
"""


@ray.remote(num_cpus=0, max_concurrency=2)
class FamilyActor:
    """Stands for `cluster.actors.EngineActor`."""

    def __init__(self, config: Config, rank: int, gpus: list[str] | None, *, several_hosts: bool) -> None:
        self._log = Path(config.output_dir) / "family.log"
        self._family: Any = None

    def start(self) -> str:
        command = [sys.executable, "-c", FAMILY]
        self._family = SupervisedProcess(command, log_path=self._log, environment=os.environ)
        self._family.wait_until_ready(lambda: "ready" in self._family.log_tail(), 120, "the family")
        return "http://127.0.0.1:1"


if __name__ == "__main__":
    run = Config(device="cpu", rollout_num_gpus=1, output_dir=sys.argv[1], debug_rollout_only=True)
    connect(run)
    engines.EngineActor = FamilyActor
    started = engines.Engines(run, place(run).engines)
    started.start()
    print("ready", flush=True)
    time.sleep(600)
