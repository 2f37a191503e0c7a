"""Whether the hosts of a run see the files that the flags name: checked before anything is loaded or overwritten."""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack

import ray

from slime_retool.cluster.placement import Placement
from slime_retool.config import Config
from slime_retool.errors import ConfigError


def check_files(config: Config, placement: Placement) -> None:
    """Refuse (ConfigError) a run on several hosts one of which lacks a checkpoint, or another's checkpoints to come."""
    if not placement.several_hosts:
        return
    config = config.for_actors()
    assert config.hf_checkpoint is not None
    model = [("--hf-checkpoint", config.hf_checkpoint)]
    trained = [(flag, path) for flag, path in config.load_folders.items() if os.path.exists(path)]
    engines = {slot.node: slot for slots in placement.engines for slot in slots}
    trainers = {slot.node: slot for slots in placement.trainers for slot in slots}
    with ExitStack() as stack:
        if not config.debug_rollout_only:
            # A file that is there for a moment in each folder that all training hosts write to.
            for flag, folder in config.save_folders.items():
                os.makedirs(folder, exist_ok=True)
                marker = tempfile.NamedTemporaryFile(prefix=".slime-retool-shared-", dir=folder)
                trained.append((flag, stack.enter_context(marker).name))
        hosts = {**engines, **trainers}.values()
        asked = [model + (trained if slot.node in trainers else []) for slot in hosts]
        answers = [
            _look.options(num_gpus=0, scheduling_strategy=slot.strategy).remote([path for _, path in named])
            for slot, named in zip(hosts, asked, strict=True)
        ]
        for (address, missing), named in zip(ray.get(answers), asked, strict=True):
            for flag, path in named:
                if path in missing:
                    raise ConfigError(
                        f"{flag}: host {address} does not see {path}; all hosts of a run need the same files under the "
                        "same paths (a shared file system)"
                    )


@ray.remote(num_cpus=0)
def _look(paths: list[str]) -> tuple[str, list[str]]:
    """This host's address and those of `paths` that it does not have."""
    return ray.util.get_node_ip_address(), [path for path in paths if not os.path.exists(path)]
