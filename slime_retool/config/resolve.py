"""What follows from the flags, the checkpoint and this host, written into a new configuration."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from megatron_bridge.hf_config import HfConfig, described_by_hf, read_hf_config
from slime_retool.config.config import Config
from slime_retool.config.devices import gpus_shown
from slime_retool.config.groups import REPLAY_ROLLOUT, RL_ROLLOUT, SFT_ROLLOUT
from slime_retool.config.require import as_config_error, require_folder
from slime_retool.errors import ConfigError


def resolve(config: Config) -> Config:
    """`config` with nothing left open: the device, the model where none was described, and what a loss that learns from
    given conversations implies. A resolved one stays as it is.

    Raises ConfigError where --hf-checkpoint holds no model that can be read.
    """
    settled = _device(config) | _model(config) | _sft(config) | _replay(config)
    return replace(config, **settled)


def read_checkpoint(config: Config) -> HfConfig:
    """config.json of --hf-checkpoint. Raises ConfigError when there is none."""
    if config.hf_checkpoint is None:
        raise ConfigError("--hf-checkpoint is required: a Hugging Face checkpoint folder")
    require_folder(config.hf_checkpoint, "--hf-checkpoint", "config.json")
    with as_config_error():
        return read_hf_config(config.hf_checkpoint)


def _device(config: Config) -> dict[str, Any]:
    """What `--device auto` is: cuda when this host shows an NVIDIA device, else cpu."""
    return {"device": "cuda" if gpus_shown() else "cpu"} if config.device == "auto" else {}


def _model(config: Config) -> dict[str, Any]:
    """Flags of the model, from config.json: all of them where none was given, else its longest context."""
    if config.hf_checkpoint is None:
        return {}
    hf = read_checkpoint(config)
    with as_config_error():
        model = described_by_hf(config.model_args, hf)
    if model.max_position_embeddings is None:
        model = replace(model, max_position_embeddings=hf.get("max_position_embeddings"))
    return asdict(model)


def _sft(config: Config) -> dict[str, Any]:
    """SFT reads conversations and starts no engine."""
    if not config.loss.supervised or config.debug_rollout_only:
        return {}
    path = SFT_ROLLOUT if config.rollout_function_path == RL_ROLLOUT else config.rollout_function_path
    return {"debug_train_only": True, "rollout_function_path": path}


def _replay(config: Config) -> dict[str, Any]:
    """Batches of an earlier run need no engine; its checkpoints, which the same flags would write, stay as they are."""
    if config.replay_rollouts is None:
        return {}
    nothing = dict.fromkeys(("save", "save_interval", "save_seconds", "save_keep", "save_hf", "eval_interval"))
    return {"debug_train_only": True, "rollout_function_path": REPLAY_ROLLOUT, "no_async_save": False, **nothing}
