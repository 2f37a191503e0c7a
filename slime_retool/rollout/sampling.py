"""SGLang sampling parameters from the configuration."""

from __future__ import annotations

from typing import Any

from slime_retool.config import Config


def training_sampling_params(config: Config) -> dict[str, Any]:
    """How training responses are sampled. `max_new_tokens` is the budget of the whole response."""
    return _sampling_params(
        config,
        temperature=config.rollout_temperature,
        top_p=config.rollout_top_p,
        top_k=config.rollout_top_k,
        max_new_tokens=config.rollout_max_response_len,
    )


def evaluation_sampling_params(config: Config) -> dict[str, Any]:
    """How evaluation responses are sampled: --eval-* where given, else as in training. Temperature 0 is greedy."""

    def either(own: Any, training: Any) -> Any:
        return training if own is None else own

    return _sampling_params(
        config,
        temperature=either(config.eval_temperature, config.rollout_temperature),
        top_p=either(config.eval_top_p, config.rollout_top_p),
        top_k=either(config.eval_top_k, config.rollout_top_k),
        max_new_tokens=either(config.eval_max_response_len, config.rollout_max_response_len),
    )


def _sampling_params(
    config: Config, *, temperature: float, top_p: float, top_k: int, max_new_tokens: int
) -> dict[str, Any]:
    params: dict[str, Any] = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "max_new_tokens": max_new_tokens,
        # The text is ours to read only, but let it show what the ids say.
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
    }
    if config.rollout_stop:
        params["stop"] = list(config.rollout_stop)
    if config.rollout_stop_token_ids:
        params["stop_token_ids"] = list(config.rollout_stop_token_ids)
    return params
