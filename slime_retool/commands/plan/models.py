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
    """The first one is the policy."""
    apart = len(config.trainer_groups) > 1
    # A model without logits has no output layer at all, so that layer's weights are not its own ones either.
    tied = config.untie_embeddings_and_output_weights
    return [
        TrainedModel(
            role.name,
            replace(role.config, untie_embeddings_and_output_weights=tied),
            has_logits=index == 0,
            apart=apart and index > 0,
        )
        for index, role in enumerate(config.roles)
    ]
