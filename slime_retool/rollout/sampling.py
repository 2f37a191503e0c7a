"""SGLang sampling parameters from the configuration."""

from __future__ import annotations

from typing import Any

from slime_retool.chat import ChatTemplate
from slime_retool.config import Config


def training_sampling_params(config: Config, template: ChatTemplate | None = None) -> dict[str, Any]:
    """How training responses are sampled, stopping where `template` ends a turn.

    `max_new_tokens` is the budget of the whole response.
    """
    params: dict[str, Any] = {
        "temperature": config.rollout_temperature,
        "top_p": config.rollout_top_p,
        "top_k": config.rollout_top_k,
        "max_new_tokens": config.rollout_max_response_len,
        # The text is ours to read only, but let it show what the ids say.
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
    }
    if config.rollout_stop:
        params["stop"] = list(config.rollout_stop)
    stop_ids = [*config.rollout_stop_token_ids, *(template.stop_ids if template is not None else ())]
    if stop_ids:
        params["stop_token_ids"] = list(dict.fromkeys(stop_ids))
    return params


def evaluation_sampling_params(config: Config, template: ChatTemplate | None = None) -> dict[str, Any]:
    """How evaluation responses are sampled: --eval-* where given, else as in training. Temperature 0 is greedy."""
    own = {
        "temperature": config.eval_temperature,
        "top_p": config.eval_top_p,
        "top_k": config.eval_top_k,
        "max_new_tokens": config.eval_max_response_len,
    }
    given = {name: value for name, value in own.items() if value is not None}
    return training_sampling_params(config, template) | given
