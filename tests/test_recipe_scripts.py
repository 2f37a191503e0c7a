"""The launch scripts: run with a stand-in for Python that records its arguments, which must then parse."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from slime_retool.config import Config, parse_config

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "examples" / "retool"
SCRIPTS = ("retool_qwen3_4b_sft.sh", "retool_qwen3_4b_rl.sh")


def launch(tmp_path: Path, script: str, *extra: str, **environment: str) -> tuple[list[str], str]:
    """(arguments after `-m slime_retool.train`, PYTHONPATH) of one run, started from an unrelated folder."""
    fake = tmp_path / "bin" / "python3"
    fake.parent.mkdir(exist_ok=True)
    fake.write_text('#!/bin/sh\nprintf "%s\\0" "$PYTHONPATH" "$@"\n')
    fake.chmod(0o755)
    clean = {"PATH": f"{fake.parent}:{os.environ['PATH']}", "HOME": str(tmp_path), **environment}
    done = subprocess.run(
        ["bash", str(RECIPE / script), *extra],
        cwd=tmp_path,
        env=clean,
        capture_output=True,
        check=True,
        timeout=30,
    )
    python_path, *arguments = done.stdout.decode().split("\0")[:-1]
    assert arguments[:2] == ["-m", "slime_retool.train"] and not done.stderr
    return arguments[2:], python_path


def config_of(tmp_path: Path, script: str, *extra: str, **environment: str) -> Config:
    return parse_config(launch(tmp_path, script, *extra, **environment)[0])


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_flag_parses_and_describes_the_4b_model(tmp_path, script):
    config = config_of(tmp_path, script)
    assert (config.num_layers, config.hidden_size, config.rotary_base) == (36, 2560, 5_000_000)
    assert config.sglang_server_flags == {}
    assert config.samples_per_rollout % config.global_batch_size == 0
    assert config.world_size % config.model_parallel_size == 0


def test_sft_is_trained_on_the_messages_column_with_the_published_values(tmp_path):
    config = config_of(tmp_path, SCRIPTS[0])
    assert config.rollout_function_path == "slime_retool.rollout.sft_rollout.generate_rollout"
    assert (config.input_key, config.loss_type, config.debug_train_only) == ("messages", "sft_loss", True)
    assert (config.num_epoch, config.rollout_batch_size, config.global_batch_size) == (3, 128, 128)
    assert (config.lr, config.min_lr, config.lr_decay_style, config.lr_warmup_fraction) == (
        1e-5,
        1e-6,
        "cosine",
        0.1,
    )
    assert (config.weight_decay, config.adam_beta1, config.adam_beta2) == (0.1, 0.9, 0.95)
    assert (config.max_tokens_per_gpu, config.world_size) == (9216, 8)


def test_rl_uses_the_retool_hooks_with_the_published_values(tmp_path):
    config = config_of(tmp_path, SCRIPTS[1])
    assert config.custom_generate_function_path == "generate_with_retool.generate"
    assert config.custom_rm_path == "generate_with_retool.reward_func"
    assert (config.rollout_batch_size, config.n_samples_per_prompt, config.global_batch_size) == (32, 8, 256)
    assert (config.eps_clip, config.eps_clip_high, config.use_kl_loss, config.kl_loss_coef) == (
        0.2,
        0.28,
        True,
        0.0,
    )
    assert (config.lr, config.lr_decay_style, config.rollout_max_response_len) == (1e-6, "constant", 8192)
    assert (config.tensor_model_parallel_size, config.rollout_num_gpus_per_engine, config.colocate) == (
        2,
        2,
        True,
    )
    assert [name for name, _ in config.eval_sets] == ["aime"] and config.n_samples_per_eval_prompt == 16


@pytest.mark.parametrize("script", SCRIPTS)
def test_paths_follow_the_root_variables_even_with_spaces(tmp_path, script):
    config = config_of(tmp_path, script, MODEL_ROOT="/some models", DATA_ROOT="/some data")
    for path in (config.hf_checkpoint, config.ref_load, config.save, config.load):
        assert path.startswith("/some models/")
    for path in (*config.prompt_data, *(file for _, file in config.eval_sets)):
        assert path.startswith("/some data/")


@pytest.mark.parametrize("script", SCRIPTS)
def test_further_arguments_come_last_and_win(tmp_path, script):
    config = config_of(tmp_path, script, "--lr", "0.5", "--output-dir", "a b", "--sglang-attention-backend", "triton")
    assert (config.lr, config.output_dir) == (0.5, "a b")
    assert config.sglang_server_flags == {"--attention-backend": ["triton"]}


@pytest.mark.parametrize("script", SCRIPTS)
def test_wandb_is_used_only_with_a_key_and_ray_is_joined_only_with_an_address(tmp_path, script):
    plain = config_of(tmp_path, script)
    assert (plain.use_wandb, plain.wandb_key, plain.ray_address) == (False, None, None)
    given = config_of(tmp_path, script, WANDB_KEY="k", RAY_ADDRESS="10.0.0.1:6379")
    assert (given.use_wandb, given.wandb_key, given.ray_address) == (True, "k", "10.0.0.1:6379")
    by_environment = config_of(tmp_path, script, WANDB_API_KEY="k")
    assert (by_environment.use_wandb, by_environment.wandb_key) == (True, None)


@pytest.mark.parametrize("script", SCRIPTS)
def test_hooks_and_package_are_on_the_python_path(tmp_path, script):
    _, python_path = launch(tmp_path, script, PYTHONPATH="/mine")
    assert python_path.split(":") == [str(RECIPE), str(ROOT), "/mine"]
