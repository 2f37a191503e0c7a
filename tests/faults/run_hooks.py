"""Hooks of a whole run in which much goes wrong, each thing once. What has happened is a file in $FAULTS_FOLDER.

Rollout 1: the sandbox's broker is killed, then a trainer rank dies in the step. Rollout 2: a scorer never returns, then
a rank dies while it saves. Rollout 3: the driver is killed.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch.distributed as dist

from faults import fault_hooks
from slime_retool.algo.algorithms import Loss
from slime_retool.algo.losses import LossInputs, LossValue, ppo_loss
from slime_retool.config import Config
from slime_retool.rollout.context import current_context
from slime_retool.trainer import checkpoint_writer
from slime_retool.types import Sample

SAMPLES = 16
"""Of a rollout: they are numbered through the run."""
CALL = 3
"""The tool call of its rollout at which something happens."""


def happened(name: str) -> bool:
    return Path(os.environ["FAULTS_FOLDER"], name).exists()


def once(name: str) -> bool:
    """Whether this has not happened yet; now it has."""
    try:
        Path(os.environ["FAULTS_FOLDER"], name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


async def generate(args: Config, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    rollout, script = sample.index // SAMPLES, fault_hooks.script
    if rollout == 1 and once("broker"):
        script.begin({CALL: kill_broker})
    if rollout == 3 and once("driver"):
        script.begin({CALL: kill_driver})
    return await fault_hooks.generate(args, sample, sampling_params)


async def kill_broker() -> None:
    box = await current_context().resource("sandbox", fault_hooks.sandbox)
    os.kill(box._client.broker_pid, signal.SIGKILL)


async def kill_driver() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def reward(args: Any, sample: Sample) -> dict[str, float]:
    if sample.index == 2 * SAMPLES + 5:
        once("scorer")
        await asyncio.sleep(100_000)
    return {"score": float(sample.index % 2), "acc": bool(sample.index % 2)}


def loss(inputs: LossInputs) -> LossValue:
    """PPO's, in a rank that dies when its time has come."""
    if dist.get_rank() == 1:
        if happened("broker") and once("mid-step"):
            os.kill(os.getpid(), signal.SIGKILL)
        if happened("scorer") and once("mid-save"):
            checkpoint_writer.direct_file_writer = die
    return ppo_loss(inputs)


def loss_that_kills_an_engine(inputs: LossInputs) -> LossValue:
    """PPO's; its first call kills the run's engine, whose requests then wait while the weights move on."""
    if once("engine"):
        folder, server = os.environ["FAULTS_FOLDER"], ["-m", "slime_retool.engine.cpu_main"]
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.cmdline()[1:3] == server and process.environ().get("FAULTS_FOLDER") == folder:
                    process.kill()
    return ppo_loss(inputs)


def die(folder: Path) -> NoReturn:
    """In the place of what opens the files of a checkpoint."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


FAULTY = Loss(name="faulty", function="faults.run_hooks.loss")
KILLS_AN_ENGINE = Loss(name="kills an engine", function="faults.run_hooks.loss_that_kills_an_engine")
