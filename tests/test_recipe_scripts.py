"""The launch scripts: run with a stand-in for Python that records its arguments, which must then parse."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_data_rendering import byte_tokenizer
from test_model_scripts import published_config

from slime_retool.config import Config, parse_config
from slime_retool.config.validate import _check_room
from slime_retool.data.readers import write_rows
from slime_retool.train import main as train

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "examples" / "retool"
SFT_4B, RL_4B = "retool_qwen3_4b_sft.sh", "retool_qwen3_4b_rl.sh"
SFT_32B, DAPO_32B, PPO_32B = (f"retool_qwen2.5_32b_{name}.sh" for name in ("sft", "dapo", "ppo"))
SCRIPTS = (SFT_4B, RL_4B, SFT_32B, DAPO_32B, PPO_32B)
# The model's config.json, by the first letters of a script's name.
MODELS = {
    "retool_qwen3_4b": ("qwen3-4B", {"rope_theta": 5e6}),
    "retool_qwen2.5_32b": ("qwen2.5-32B", {"rms_norm_eps": 1e-6}),
}


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
        timeout=300,
    )
    python_path, *arguments = done.stdout.decode().split("\0")[:-1]
    assert arguments[:2] == ["-m", "slime_retool.train"] and not done.stderr
    return arguments[2:], python_path


def config_of(tmp_path: Path, script: str, *extra: str, **environment: str) -> Config:
    return parse_config(launch(tmp_path, script, *extra, **environment)[0])


def real_paths(tmp_path: Path, script: str) -> dict[str, str]:
    """Variables that point at the real model's config.json, with a small tokenizer, and one row of data."""
    name, changed = next(value for start, value in MODELS.items() if script.startswith(start))
    for folder in ("hf", "ref"):
        (tmp_path / folder).mkdir()
    config = {**published_config(name), **changed, "max_position_embeddings": 262144}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    (tmp_path / "ref" / "latest_checkpointed_iteration.txt").write_text("release")
    byte_tokenizer().save_pretrained(tmp_path / "hf")
    answer = {"role": "assistant", "content": "Answer: \\boxed{1}"}
    row = {"prompt": [{"role": "user", "content": "q"}], "label": "1"}
    write_rows(tmp_path / "rows.jsonl", [row | {"messages": [*row["prompt"], answer]}])
    rows = str(tmp_path / "rows.jsonl")
    return {
        "HF_CHECKPOINT": str(tmp_path / "hf"), "REF_LOAD": str(tmp_path / "ref"), "SAVE_DIR": str(tmp_path / "save"),
        "PROMPT_DATA": rows, "EVAL_DATA": rows,
    }  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_dry_run_with_the_real_shapes_passes_every_check(tmp_path, script, monkeypatch, capsys):
    arguments, _ = launch(tmp_path, script, "--dry-run", "--device", "cuda", **real_paths(tmp_path, script))
    monkeypatch.syspath_prepend(str(RECIPE))
    monkeypatch.setitem(_check_room.__globals__, "free_bytes", lambda folder: 1 << 50)
    assert train(arguments) == 0, capsys.readouterr().err
    assert "--num-layers" in capsys.readouterr().out


def test_another_model_than_the_tiny_one_is_refused(tmp_path):
    done = subprocess.run(
        ["bash", str(RECIPE / RL_4B)], env={"PATH": os.environ["PATH"], "MODEL": "7b"}, capture_output=True, text=True
    )
    assert done.returncode == 2 and "MODEL must be empty or 'tiny', got '7b'" in done.stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_interpreter_without_torch_is_named_with_what_to_do(tmp_path, script):
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(bare / "bin" / "python"), "MODEL": "tiny"}
    done = subprocess.run(["bash", str(RECIPE / script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith(f"{bare}/bin/python has no torch: first 'source .venv/")


@pytest.mark.parametrize("script", (SFT_4B, RL_4B))
def test_every_flag_parses_and_describes_the_4b_model(tmp_path, script):
    config = config_of(tmp_path, script)
    assert (config.num_layers, config.hidden_size, config.rotary_base) == (36, 2560, 5_000_000)
    assert config.sglang_server_flags == {}
    assert config.samples_per_rollout % config.global_batch_size == 0
    assert config.world_size % config.model_parallel_size == 0


def test_sft_is_trained_on_the_messages_column_with_the_published_values(tmp_path):
    config = config_of(tmp_path, SFT_4B)
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


def test_the_32b_runs_have_the_values_published_for_verl(tmp_path):
    sft, dapo, ppo = (config_of(tmp_path, script) for script in (SFT_32B, DAPO_32B, PPO_32B))
    assert (sft.num_epoch, sft.global_batch_size, sft.rollout_max_context_len) == (6, 32, 16384)
    for config in (dapo, ppo):
        assert (config.num_layers, config.hidden_size, config.max_turns) == (64, 5120, 8)
        assert (config.eps_clip, config.eps_clip_high, config.eps_clip_c, config.lr) == (0.2, 0.28, 10.0, 1e-6)
        assert (config.rollout_max_prompt_len, config.rollout_max_response_len) == (2048, 16384)
        assert (config.n_samples_per_eval_prompt, config.eval_top_p, config.eval_interval) == (30, 0.6, 5)
        assert (config.world_size, config.rollout_num_gpus_per_engine, config.use_kl_loss) == (32, 4, False)
    assert (dapo.advantage_estimator, dapo.rollout_batch_size, dapo.n_samples_per_prompt) == ("grpo", 512, 16)
    assert dapo.steps_per_rollout == 8  # mini-batches of 64 prompts
    assert (ppo.advantage_estimator, ppo.rollout_batch_size, ppo.n_samples_per_prompt) == ("ppo", 1024, 1)
    assert (ppo.steps_per_rollout, ppo.critic_lr, ppo.num_critic_only_steps) == (4, 2e-6, 20)
    assert (dapo.num_rollout, ppo.num_rollout, dapo.save_keep, ppo.save_keep) == (150, 250, 3, 3)
    assert (ppo.gamma, ppo.lambd, ppo.normalize_advantages, ppo.value_clip) == (1.0, 1.0, True, 0.5)


def test_rl_uses_the_retool_hooks_with_the_published_values(tmp_path):
    config = config_of(tmp_path, RL_4B)
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
    assert config.rollout_max_context_len == config.max_tokens_per_gpu == 9216  # slime's cap of prompt and response
    assert (config.tensor_model_parallel_size, config.rollout_num_gpus_per_engine, config.colocate) == (
        2,
        2,
        True,
    )
    assert [name for name, _ in config.eval_sets] == ["aime"] and config.n_samples_per_eval_prompt == 16


def test_no_two_recipes_write_their_figures_into_one_folder(tmp_path):
    folders = {config_of(tmp_path, script).output_dir for script in SCRIPTS}
    assert len(folders) == len(SCRIPTS)
    assert config_of(tmp_path, SFT_4B, SAVE_DIR="/my run").output_dir == "/my run/output"


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


@pytest.mark.parametrize("length", [["--num-rollout", "7"], ["--num-epoch=7"]])
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_caller_says_how_long_a_run_is(tmp_path, script, length):
    config = config_of(tmp_path, script, *length)
    assert (config.num_rollout, config.num_epoch) == ((7, None) if length[0] == "--num-rollout" else (None, 7))


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
