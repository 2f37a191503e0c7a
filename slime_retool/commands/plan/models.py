"""The models that a run trains, as far as a plan tells them apart."""

from __future__ import annotations

from dataclasses import dataclass, replace

from slime_retool.config import Config


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


def trained_models(config: Config) -> list[TrainedModel]:
    """The first one is the policy; the others have no output layer, be it tied or not."""
    policy, *others = config.roles
    apart = len(config.trainer_groups) > 1
    alike = {"untie_embeddings_and_output_weights": config.untie_embeddings_and_output_weights}
    return [
        TrainedModel(policy.name, config, has_logits=True, apart=False),
        *(TrainedModel(role.name, replace(role.config, **alike), has_logits=False, apart=apart) for role in others),
    ]
