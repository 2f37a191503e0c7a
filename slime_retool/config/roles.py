"""The models that a run trains, and the processes that hold them: the policy, and beside it PPO's critic."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from slime_retool.config.config import Config


@dataclass(frozen=True)
class Role:
    """A model that is trained."""

    name: str
    config: Config
    """The run's options as this model has them: its learning rate, folders, adapters, and processes."""

    def flag(self, actors: str) -> str:
        """The flag of this model's that is `actors` of the actor: --save, --critic-save."""
        return actors if self.name == "actor" else f"--{self.name}-{actors.removeprefix('--')}"

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of one checkpoint."""
        return self.config.checkpoint_bytes(value_head=self.name == "critic")


@dataclass(frozen=True)
class TrainerGroup:
    """Processes with one layout, and the models that each of them holds its part of."""

    holds: str
    """What `trainer.core.Trainer` takes as `roles`: "all", or the name of the only model."""
    config: Config
    """The run's options as these processes have them."""
    roles: tuple[Role, ...]

    @property
    def name(self) -> str:
        """As its flags begin: --actor-num-nodes, --critic-num-nodes."""
        return self.roles[0].name


def trainer_groups(config: Config) -> tuple[TrainerGroup, ...]:
    """The actor's processes first, then those of a separate critic."""
    actor, *others = roles_of(config)
    if not others or not _is_separate(config):
        return (TrainerGroup("all", config, (actor, *others)),)
    own = _in_own_processes(config)
    return TrainerGroup("actor", config, (actor,)), TrainerGroup("critic", own, tuple(others))


def roles_of(config: Config) -> tuple[Role, ...]:
    """The actor first."""
    actor = Role("actor", config)
    return (actor, Role("critic", critic_config(config))) if config.uses_critic else (actor,)


def bytes_of_a_save(config: Config) -> int:
    """Bytes of what is written at one save."""
    return sum(role.checkpoint_bytes for role in roles_of(config))


def critic_config(config: Config) -> Config:
    """The run's options as the critic has them: its own learning rate and folders, no tied output layer, no adapters.

    Its folders are by default those called `critic` in the actor's.
    """
    lr = config.lr if config.critic_lr is None else config.critic_lr
    return replace(
        _in_own_processes(config) if _is_separate(config) else config,
        lr=lr,
        min_lr=min(config.min_lr, lr),
        lr_warmup_iters=config.critic_lr_warmup_iters,
        lr_warmup_fraction=None,
        num_critic_only_steps=0,
        load=config.critic_load or _inside(config.load),
        save=config.critic_save or _inside(config.save),
        untie_embeddings_and_output_weights=True,
        lora_rank=None,
    )


def _is_separate(config: Config) -> bool:
    return config.critic_num_nodes is not None or config.critic_num_gpus_per_node is not None


def _in_own_processes(config: Config) -> Config:
    return replace(
        config,
        actor_num_nodes=1 if config.critic_num_nodes is None else config.critic_num_nodes,
        actor_num_gpus_per_node=1 if config.critic_num_gpus_per_node is None else config.critic_num_gpus_per_node,
        offload_train=False,  # nobody else wants its devices
    )


def _inside(folder: str | None) -> str | None:
    return None if folder is None else os.path.join(folder, "critic")
