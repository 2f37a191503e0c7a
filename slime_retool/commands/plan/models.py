"""The models that a run trains: the actor and, with PPO, a critic in the same processes or in its own."""

from __future__ import annotations

from dataclasses import dataclass, replace

from slime_retool.config import Config
from slime_retool.config.algorithm import check_critic_processes


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """One model with its optimizer."""

    name: str
    config: Config
    """The options as the processes that train it have them."""
    has_logits: bool
    """It predicts words. Otherwise one value for each token takes the place of the output layer."""
    apart: bool
    """It has processes of its own, which train while the first model's do."""


def check_models(config: Config) -> None:
    """Refuse (ConfigError) processes of a further model that the parallel sizes do not divide."""
    check_critic_processes(config)


def trained_models(config: Config) -> list[TrainedModel]:
    """The first one is the policy."""
    models = [TrainedModel("actor", config, has_logits=True, apart=False)]
    if config.uses_critic:
        *others, (_, own) = config.trainer_groups
        models.append(TrainedModel("critic", replace(own, lora_rank=None), has_logits=False, apart=bool(others)))
    return models
