"""Configuration: flags from fields, and every mistake refused in one line with exit code 2."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_data_rendering import byte_tokenizer

from megatron_bridge import flags
from megatron_bridge.hf_config import read_hf_config
from slime_retool.chat import load_tokenizer
from slime_retool.cli import main as slime_retool
from slime_retool.config import Config, parse_config, resolve, validate
from slime_retool.config.groups import RolloutArgs
from slime_retool.config.printable import flag_lines
from slime_retool.config.schedule import with_num_rollout
from slime_retool.errors import ConfigError
from slime_retool.train import main as train

ROOT = Path(__file__).resolve().parents[1]
HF_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
    "attention_bias": False,
}


@pytest.fixture
def run_args(tmp_path: Path) -> dict[str, str | None]:
    """Flags of a run that passes validation; a None value is a switch."""
    hf, ref = tmp_path / "hf", tmp_path / "ref"
    hf.mkdir(), ref.mkdir()
    (hf / "config.json").write_text(json.dumps(HF_CONFIG))
    (ref / "latest_checkpointed_iteration.txt").write_text("release")
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+1?", "label": "2"}\n')
    return {
        "--device": "cpu",
        "--hf-checkpoint": str(hf),
        "--ref-load": str(ref),
        "--prompt-data": str(tmp_path / "data.jsonl"),
        "--num-rollout": "2",
        "--rollout-batch-size": "4",
        "--n-samples-per-prompt": "4",
    }


@pytest.fixture
def startable_args(run_args: dict[str, str | None]) -> dict[str, str | None]:
    """`run_args` with a tokenizer, as what reads the data needs."""
    hf = Path(str(run_args["--hf-checkpoint"]))
    byte_tokenizer().save_pretrained(hf)
    (hf / "config.json").write_text(json.dumps(HF_CONFIG | {"vocab_size": 300}))
    return run_args


def argv(args: dict[str, str | None]) -> list[str]:
    return [token for flag, value in args.items() for token in ([flag] if value is None else [flag, *value.split()])]


def checked(args: dict[str, str | None]) -> Config:
    config = resolve(parse_config(argv(args)))
    validate(config)
    return config


def test_a_complete_configuration_passes_and_model_flags_follow_from_the_checkpoint(run_args):
    config = checked(run_args)
    assert (config.num_layers, config.num_query_groups, config.qk_layernorm) == (4, 2, True)
    assert config.samples_per_rollout == 16 and config.steps_per_rollout == 1 and config.num_engines == 1


def test_every_field_of_every_group_is_a_flag_with_help():
    for group in flags.groups_of(Config):
        assert group.__doc__, group
    for field in Config.__dataclass_fields__.values():
        if field.name not in ("sglang_server_flags", "hook_args"):
            assert field.metadata["flag"].help.endswith((".", ")")), field.name


def test_a_flag_given_twice_takes_the_last_value():
    assert parse_config(["--rotary-base", "1000000", "--rotary-base", "5000000"]).rotary_base == 5000000


def test_undeclared_sglang_flags_are_kept_for_the_servers():
    config = parse_config(["--sglang-attention-backend", "triton", "--sglang-disable-radix-cache", "--seed", "3"])
    assert config.sglang_server_flags == {"--attention-backend": ["triton"], "--disable-radix-cache": []}
    assert config.seed == 3


def test_devices_are_taken_in_turns_only_where_they_are_shared():
    def turns(*words: str) -> tuple[bool, bool]:
        config = parse_config(["--device", "cuda", *words])
        return config.offloads_train, config.offloads_rollout

    assert turns("--colocate") == (True, True) and turns() == (False, False)
    assert turns("--colocate", "--no-offload-train") == (False, True)
    assert turns("--colocate", "--debug-rollout-only") == turns("--colocate", "--debug-train-only") == (False, False)


def test_weights_travel_by_what_the_engines_can_take(run_args):
    def transport(**changes: str | None) -> str:
        return checked(
            run_args | {"--" + flag.replace("_", "-"): value for flag, value in changes.items()}
        ).weight_transport

    external = "http://10.0.0.2:30000"
    assert transport() == transport(rollout_external_urls=external) == "broadcast"
    assert transport(colocate=None) == "ipc"
    assert transport(rollout_external_urls=external, update_weight_disk_dir="/shared") == "disk"
    assert transport(rollout_external_urls="http://localhost:30000", update_weight_transport="disk") == "disk"


def test_processes_in_other_working_folders_get_absolute_paths(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    config = parse_config(["--hf-checkpoint", "hf", "--save", "../save", "--prompt-data", "a.jsonl"])
    away = config.for_actors()
    assert (away.hf_checkpoint, away.load) == (str(tmp_path / "hf"), None)
    assert away.save == str(tmp_path.parent / "save") and away.output_dir == str(tmp_path / "outputs" / "run")


def test_to_flags_rebuilds_the_configuration(run_args):
    config = checked(run_args | {"--no-use-distributed-optimizer": None, "--rollout-stop": "a b"})
    assert parse_config(flags.to_flags(config)) == config


def test_group_titles_come_from_the_docstrings():
    assert RolloutArgs in flags.groups_of(Config)
    assert RolloutArgs.__doc__.splitlines()[0].startswith("Rollout")


OUT_OF_BOUNDS = """
    --actor-num-nodes 0                 --actor-num-gpus-per-node -1         --rollout-num-gpus 0
    --rollout-num-gpus-per-engine 0     --update-weight-buffer-size 0        --distributed-timeout-minutes 0
    --tensor-model-parallel-size 0      --pipeline-model-parallel-size 0     --context-parallel-size 0
    --expert-model-parallel-size 0      --expert-tensor-parallel-size 0      --save-interval 0
    --save-keep 0                       --rollout-max-prompt-len 0           --num-rollout -1
    --num-epoch 0                       --rollout-batch-size 0               --n-samples-per-prompt 0
    --max-sampling-rounds 0             --reward-timeout 0                   --rollout-max-response-len 0
    --rollout-max-context-len 0         --rollout-temperature 0              --rollout-top-p 0
    --rollout-top-p 1.1                 --rollout-top-k 0                    --rollout-top-k -2
    --rollout-request-timeout 0         --rollout-request-retries -1         --max-turns 0
    --max-tool-calls -1                 --max-observation-tokens 0           --sandbox-url h:1
    --tool-timeout 0                    --tool-memory-mb 0                   --tool-concurrency 0
    --tool-retries -1                   --eval-interval 0                    --n-samples-per-eval-prompt 0
    --eval-max-response-len 0           --eval-temperature -1                --eval-top-p 0
    --eval-top-k 0                      --eval-endpoint-url ftp://h          --eval-endpoint-concurrency 0
    --lora-alpha 0                      --lr 0                               --lr nan
    --lr-warmup-iters -1                --lr-warmup-fraction 1               --lr-decay-iters 0
    --weight-decay -0.1                 --adam-beta1 1                       --adam-beta2 -0.1
    --adam-eps 0                        --clip-grad -1                       --global-batch-size 0
    --micro-batch-size 0                --max-tokens-per-gpu 0               --keep-logits-gib nan
    --recompute-num-layers 0            --optimizer-offload-fraction 0       --optimizer-offload-fraction 1.1
    --attention-dropout 0.1             --hidden-dropout 0.1                 --sglang-mem-fraction-static 1
    --sglang-server-concurrency 0       --sglang-startup-timeout 0           --sglang-max-total-tokens 0
    --rollout-external-urls h:1         --overlong-penalty-factor 0
""".split()
"""Values that one flag alone does not allow."""


@pytest.mark.parametrize(("flag", "value"), list(zip(OUT_OF_BOUNDS[::2], OUT_OF_BOUNDS[1::2], strict=True)))
def test_values_out_of_bounds_are_refused_with_the_rule_and_the_value(flag: str, value: str, run_args):
    with pytest.raises(ConfigError, match=rf"^{flag} must be .+, got {value}(\.0)?$"):
        checked(run_args | {flag: value})


BAD = {
    "ipc to engines on other devices": ({"--update-weight-transport": "ipc"}, "ipc needs --colocate"),
    "a transport that there is not": (
        {"--update-weight-transport": "rdma"},
        "must be one of auto, ipc, broadcast, disk, or the dotted path of a Transport, got rdma",
    ),
    "a transport that cannot be imported": (
        {"--update-weight-transport": "no_such_module.Transport"},
        "--update-weight-transport 'no_such_module.Transport': cannot import 'no_such_module'",
    ),
    "more colocated engines than trainers": (
        {"--colocate": None, "--rollout-num-gpus": "2"},
        "2 GPUs for generation (--rollout-num-gpus) are more than the 1 training GPUs",
    ),
    "NCCL between two processes of one card": (
        {"--device": "cuda", "--colocate": None, "--update-weight-transport": "broadcast"},
        "broadcast cannot join two processes of one GPU",
    ),
    "external engines on the trainer's own devices": (
        {"--colocate": None, "--rollout-external-urls": "http://127.0.0.1:1"},
        "cannot be combined with --rollout-external-urls",
    ),
    "a colocated engine on two hosts": (
        {
            "--device": "cuda",
            "--colocate": None,
            "--actor-num-nodes": "2",
            "--actor-num-gpus-per-node": "3",
            "--rollout-num-gpus-per-engine": "2",
            "--rollout-batch-size": "6",
        },
        "an engine of --rollout-num-gpus-per-engine 2 would span hosts of --actor-num-gpus-per-node 3",
    ),
    "files for external engines that cannot see them": (
        {"--update-weight-transport": "disk", "--rollout-external-urls": "http://127.0.0.1:1 http://10.0.0.2:1"},
        "add --update-weight-disk-dir with a folder that they see under the same path",
    ),
    "a folder for weights that travel otherwise": (
        {"--update-weight-disk-dir": "/tmp"},
        "--update-weight-disk-dir has no effect on --update-weight-transport broadcast",
    ),
    "an external engine without a scheme": (
        {"--rollout-external-urls": "10.0.0.2:30000"},
        "--rollout-external-urls must be an address like http://HOST:PORT, got 10.0.0.2:30000",
    ),
    "an external engine named twice": (
        {"--rollout-external-urls": "http://h:1 http://h:1"},
        "--rollout-external-urls names a server twice: http://h:1 http://h:1",
    ),
    "world that TP x PP does not divide": (
        {"--actor-num-gpus-per-node": "3", "--tensor-model-parallel-size": "2"},
        "2 x 1 = 2 does not divide",
    ),
    "heads that TP does not divide": (
        {"--actor-num-gpus-per-node": "8", "--tensor-model-parallel-size": "8"},
        "key/value heads (2); use 2",
    ),
    "groups that TP does not divide": (
        {"--actor-num-gpus-per-node": "4", "--tensor-model-parallel-size": "4"},
        "key/value heads (2); use 2",
    ),
    "layers that PP cannot spread": (
        {"--actor-num-gpus-per-node": "3", "--pipeline-model-parallel-size": "3"},
        "--decoder-last-pipeline-num-layers",
    ),
    "more stages than layers": (
        {"--actor-num-gpus-per-node": "8", "--pipeline-model-parallel-size": "8"},
        "use at most 4",
    ),
    "a batch that does not divide": ({"--global-batch-size": "5"}, "multiple of --global-batch-size 5"),
    "a batch the ranks cannot share": ({"--actor-num-gpus-per-node": "3"}, "multiple of the 3 data-parallel ranks"),
    "a batch that no size fits": ({"--actor-num-gpus-per-node": "6"}, "use --rollout-batch-size 3"),
    "a share that no rank can take": (
        {"--actor-num-gpus-per-node": "4", "--global-batch-size": "2"},
        "use --global-batch-size 4",
    ),
    "no GPUs for generation": ({"--rollout-num-gpus": "0"}, "--rollout-num-gpus must be at least 1, got 0"),
    "a negative run": ({"--num-rollout": "-1"}, "--num-rollout must be at least 0, got -1"),
    "no room for a prompt": ({"--rollout-max-prompt-len": "0"}, "--rollout-max-prompt-len must be at least 1, got 0"),
    "no room at all": ({"--rollout-max-context-len": "0"}, "--rollout-max-context-len must be at least 1, got 0"),
    "no samples of an evaluation": ({"--n-samples-per-eval-prompt": "0"}, "must be at least 1, got 0"),
    "no room to answer in": ({"--eval-max-response-len": "0"}, "--eval-max-response-len must be at least 1, got 0"),
    "fewer tries than one": ({"--tool-retries": "-1"}, "--tool-retries must be at least 0, got -1"),
    "an empty schedule": ({"--lr-decay-iters": "0"}, "--lr-decay-iters must be at least 1, got 0"),
    "growing weights": ({"--weight-decay": "-0.1"}, "--weight-decay must be at least 0, got -0.1"),
    "chunks without layers": ({"--recompute-num-layers": "0"}, "--recompute-num-layers must be at least 1, got 0"),
    "output in a file": ({"--output-dir": f"{__file__}/run"}, f"{__file__} is not a folder; name another place"),
    "checkpoints in a file": ({"--save": __file__}, f"--save {__file__}: {__file__} is not a folder"),
    "a critic in a file": (
        {"--advantage-estimator": "ppo", "--critic-save": f"{__file__}/c"},
        f"--critic-save {__file__}/c: {__file__} is not a folder",
    ),
    "a hook by a file's path": ({"--custom-rm-path": "./my_task.reward"}, "--custom-rm-path must be a dotted path"),
    "missing prompt data": ({"--prompt-data": "/nowhere/x.jsonl"}, "no such file: /nowhere/x.jsonl"),
    "missing checkpoint": ({"--hf-checkpoint": "/nowhere/model"}, "no such folder: /nowhere/model"),
    "reference that is no checkpoint": ({"--ref-load": "/tmp"}, "latest_checkpointed_iteration.txt"),
    "wrong rotary base": ({"--num-layers": "4", "--rotary-base": "77"}, "--"),
    "an overlong buffer beyond the limit": ({"--overlong-buffer-len": "99999"}, "--rollout-max-response-len"),
    "an overlong penalty without a buffer": ({"--overlong-penalty-factor": "2"}, "--overlong-buffer-len"),
    "both lengths of the run": ({"--num-epoch": "2"}, "one of --num-rollout and --num-epoch"),
    "temperature zero": ({"--rollout-temperature": "0"}, "above 0"),
    "odd evaluation sets": ({"--eval-prompt-data": "aime"}, "pairs NAME FILE"),
    "missing evaluation file": ({"--eval-prompt-data": "aime /nowhere/a.jsonl"}, "no such file: /nowhere/a.jsonl"),
    "evaluation without a set": ({"--eval-interval": "2"}, "--eval-interval has no effect without --eval-prompt-data"),
    "dynamic batches without a size": ({"--use-dynamic-batch-size": None}, "--max-tokens-per-gpu"),
    "a group of one": ({"--n-samples-per-prompt": "1"}, "at least 2"),
    "KL weight without KL": ({"--kl-loss-coef": "0.1"}, "--use-kl-loss"),
    "clip range upside down": ({"--eps-clip-high": "0.1"}, "--eps-clip-high"),
    "a clip that only cispo has": (
        {"--eps-clip": "1"},
        "--eps-clip must be below 1, got 1: only cispo can do without a lower bound",
    ),
    "dual clip of a loss without one": (
        {"--advantage-estimator": "cispo", "--eps-clip-c": "3"},
        "--eps-clip-c is of no use to the loss cispo",
    ),
    "two divisors": (
        {"--loss-constant-length": "64", "--calculate-per-token-loss": None},
        "two divisors of one loss",
    ),
    "an unknown discount": ({"--gamma": "1.5"}, "--gamma must be at least 0 and at most 1, got 1.5"),
    "KL twice": (
        {"--use-kl-loss": None, "--kl-loss-coef": "0.1", "--kl-coef": "0.1"},
        "--kl-loss-coef 0.1 and --kl-coef 0.1 count the same KL twice",
    ),
    "importance weights of the engine against itself": (
        {"--use-tis": None, "--use-rollout-logprobs": None},
        "never computes",
    ),
    "importance limits without importance weights": (
        {"--tis-clip": "3"},
        "--tis-clip has no effect without --use-tis; add it or drop --tis-clip",
    ),
    "a limit of tokens that nothing packs to": (
        {"--max-tokens-per-gpu": "4096"},
        "--max-tokens-per-gpu has no effect without --use-dynamic-batch-size; add it or drop --max-tokens-per-gpu",
    ),
    "older samples that the loss does not know": (
        {"--max-staleness": "1"},
        "older weights, which the loss has to know: add --use-tis (decoupled PPO) or --use-rollout-logprobs",
    ),
    "updates within a rollout function of one's own": (
        {"--max-staleness": "2", "--use-tis": None, "--rollout-function-path": "rollout_hooks.rollout_that_fails"},
        "--max-staleness 2 needs the default rollout",
    ),
    "staleness of given conversations": (
        {"--max-staleness": "1", "--loss-type": "sft_loss", "--n-samples-per-prompt": "1"},
        "--max-staleness 1 is of generated samples; drop it for sft_loss",
    ),
    "importance limits upside down": ({"--use-tis": None, "--tis-clip-low": "3"}, "below --tis-clip 2.0, got 3.0"),
    "distillation without a teacher": ({"--distill-coef": "1"}, "--teacher-url and --distill-coef go together"),
    "a teacher at another temperature": (
        {"--distill-coef": "1", "--teacher-url": "http://127.0.0.1:9", "--rollout-temperature": "0.7"},
        "--rollout-temperature must be 1, got 0.7",
    ),
    "adapters without a rank": ({"--lora-alpha": "8"}, "--lora-alpha has no effect without --lora-rank"),
    "adapters of rank 0": ({"--lora-rank": "0"}, "--lora-rank must be at least 1, got 0"),
    "adapters wider than the model": ({"--lora-rank": "65"}, "--lora-rank must be at most the hidden size 64, got 65"),
    "an update of no adapters": (
        {"--lora-weight-update": "adapters"}, "--lora-weight-update has no effect without --lora-rank"
    ),
    "adapters by a transport of whole weights": (
        {
            "--lora-rank": "4", "--lora-weight-update": "adapters",
            "--update-weight-transport": "slime_retool.trainer.weight_sync.disk.DiskTransport",
        },
        "sends whole weights; use --lora-weight-update merged",
    ),
    "adapters beside a speculating model": (
        {"--lora-rank": "4", "--lora-weight-update": "adapters", "--sglang-speculative-algorithm": "EAGLE3"},
        "with NGRAM only, got --sglang-speculative-algorithm EAGLE3",
    ),
    "an engine with adapters that gives back nothing": (
        {
            "--lora-rank": "4", "--lora-weight-update": "adapters", "--offload-rollout": None,
            "--no-offload-rollout-cache": None,
        },
        "leaves them nothing to give back; use --no-offload-rollout",
    ),
    "an engine's adapters set by hand": (
        {"--sglang-max-lora-rank": "8"}, "--sglang-max-lora-rank cannot be passed through: --max-lora-rank is set from"
    ),
    "a token for no server": ({"--sandbox-token-file": "token"}, "--sandbox-token-file has no effect without --sand"),
    "a token that is not there": (
        {"--sandbox-url": "http://h:1", "--sandbox-token-file": "/no/token"}, "--sandbox-token-file: no such file"
    ),
    "adapters that count nothing": ({"--lora-rank": "4", "--lora-alpha": "0"}, "--lora-alpha must be above 0"),
    "two adapters on one layer": (
        {"--lora-rank": "4", "--lora-target-modules": "linear_qkv linear_qkv"},
        "names one twice",
    ),
    "a critic without ppo": (
        {"--critic-lr": "1e-5"},
        "--critic-lr has no effect without the critic of --advantage-estimator ppo",
    ),
    "a critic in the actor's folder": (
        {"--advantage-estimator": "ppo", "--save": "/tmp/no-such/a", "--critic-save": "/tmp/no-such/a"},
        "another folder than the actor's",
    ),
    "a critic apart that TP does not divide": (
        {
            "--advantage-estimator": "ppo",
            "--actor-num-gpus-per-node": "2",
            "--tensor-model-parallel-size": "2",
            "--critic-num-gpus-per-node": "3",
        },
        "multiple of tensor x pipeline x context parallel size 2; use 4",
    ),
    "less than one GPU of engines": ({"--rollout-num-gpus": "-2"}, "--rollout-num-gpus must be at least 1"),
    "no room for a single token": ({"--rollout-max-context-len": "0"}, "--rollout-max-context-len must be at least 1"),
    "fewer than no further tries": (
        {"--rollout-request-retries": "-1"},
        "--rollout-request-retries must be at least 0",
    ),
    "chunks of layers where parts of layers are recomputed": (
        {"--recompute-granularity": "selective", "--recompute-num-layers": "1"},
        "--recompute-num-layers 1 is of --recompute-granularity full",
    ),
    "dropout": ({"--hidden-dropout": "0.1"}, "must be 0"),
    "bf16 on the CPU": ({"--precision": "bf16"}, "needs GPUs"),
    "a hook that does not exist": ({"--custom-rm-path": "no_such_module.f"}, "cannot import 'no_such_module'"),
    "a hook without a dot": ({"--custom-rm-path": "reward"}, "dotted path"),
    "saving nowhere": ({"--save-interval": "3"}, "--save DIR"),
    "keeping none": ({"--save": "/tmp/no-such/a", "--save-keep": "0"}, "--save-keep must be at least 1, got 0"),
    "keeping what is not saved": ({"--save-keep": "2"}, "--save-keep has no effect without --save DIR"),
    "SFT of groups": ({"--loss-type": "sft_loss"}, "--n-samples-per-prompt must be 1, got 4"),
    "context beyond the model": ({"--rollout-max-context-len": "9999"}, "512 positions"),
    "two warm-ups": ({"--lr-warmup-iters": "3", "--lr-warmup-fraction": "0.1"}, "one of --lr-warmup"),
    "a warm-up longer than the run": (
        {"--lr-decay-style": "cosine", "--lr-warmup-iters": "2"},
        "2 warm-up steps leave nothing of a schedule of 2; lower --lr-warmup-iters",
    ),
    "a critic that leaves the policy no rollout": (
        {"--advantage-estimator": "ppo", "--num-critic-only-steps": "2"},
        "--num-critic-only-steps 2 leaves none of the run's 2 rollouts to train the policy",
    ),
    "a critic's warm-up longer than the run": (
        {"--advantage-estimator": "ppo", "--lr-decay-style": "linear", "--critic-lr-warmup-iters": "5"},
        "lower --critic-lr-warmup-iters",
    ),
    "routing replay of a dense model": (
        {"--use-rollout-routing-replay": None},
        "--use-rollout-routing-replay repeats the engine's choice of experts, and this model is dense",
    ),
    "experts returned for nobody": (
        {"--sglang-enable-return-routed-experts": None},
        "--sglang-enable-return-routed-experts cannot be passed through: --enable-return-routed-experts is set from "
        "--use-rollout-routing-replay",
    ),
    "routing replay without an engine": (
        {"--use-rollout-routing-replay": None, "--loss-type": "sft_loss", "--n-samples-per-prompt": "1"},
        "--use-rollout-routing-replay repeats the engine's choice of experts; drop it for sft_loss",
    ),
    "engines that do not divide": (
        {"--rollout-num-gpus": "3", "--rollout-num-gpus-per-engine": "2"},
        "does not divide the 3 GPUs",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_mistakes_are_refused_in_one_line(case: str, run_args):
    changes, expected = BAD[case]
    with pytest.raises(ConfigError) as caught:
        checked(run_args | changes)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_loss_of_sft_alone_makes_a_run_of_sft(run_args):
    del run_args["--n-samples-per-prompt"]
    config = checked(run_args | {"--loss-type": "sft_loss"})
    own = "slime_retool.rollout.sft_rollout.generate_rollout"
    assert (config.rollout_function_path, config.debug_train_only, config.num_engines) == (own, True, 0)
    spelled = {"--rollout-function-path": own, "--debug-train-only": None, "--n-samples-per-prompt": "1"}
    assert checked(run_args | {"--loss-type": "sft_loss"} | spelled) == config == resolve(config)
    other = {"--rollout-function-path": "rollout_hooks.rollout_that_fails"}
    assert checked(run_args | {"--loss-type": "sft_loss"} | other).rollout_function_path == other.popitem()[1]
    with pytest.raises(ConfigError, match="--loss-type sft_loss .*--debug-rollout-only"):
        checked(run_args | {"--loss-type": "sft_loss", "--debug-rollout-only": None})


def test_resolving_and_checking_leave_a_configuration_as_it_is(run_args):
    save = {"--save": "/tmp/no-such/x"}
    given = parse_config(argv(run_args | {"--device": "auto", "--advantage-estimator": "ppo"} | save))
    before = repr(given)
    resolved = resolve(given)
    after = repr(resolved)
    validate(resolved)
    assert (repr(given), repr(resolved)) == (before, after) and resolve(resolved) == resolved != given
    with pytest.raises(FrozenInstanceError):
        resolved.lr = 1.0


def test_adapters_need_the_frozen_weights_and_have_twice_their_rank_as_alpha(run_args):
    args = run_args | {"--lora-rank": "4", "--lora-target-modules": "linear_qkv"}
    lora = checked(args).lora
    assert lora is not None and (lora.rank, lora.alpha, lora.targets) == (4, 8.0, ("linear_qkv",))
    assert lora.base == run_args["--ref-load"] and checked(run_args).lora is None
    ref = args.pop("--ref-load")
    with pytest.raises(ConfigError, match="--lora-rank needs the frozen weights.*add --ref-load DIR"):
        checked(args | {"--load": ref})


def write_mixture(hf: str | None, num_experts: int = 4) -> None:
    """Make the model a mixture of experts."""
    experts = {"num_experts": num_experts, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    kind = {"norm_topk_prob": True, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    untied = {"tie_word_embeddings": False}
    (Path(str(hf)) / "config.json").write_text(json.dumps(HF_CONFIG | experts | kind | untied))


def test_routing_replay_is_for_mixtures_of_experts_whose_prompts_are_read_in_chunks(run_args):
    replay = {"--use-rollout-routing-replay": None}
    write_mixture(run_args["--hf-checkpoint"], num_experts=70_000)
    with pytest.raises(ConfigError, match="kept in 16 bits: at most 65535 of --num-experts, got 70000"):
        checked(run_args | replay)
    write_mixture(run_args["--hf-checkpoint"])
    assert checked(run_args | replay).use_rollout_routing_replay
    assert checked(run_args | replay | {"--sglang-chunked-prefill-size": "512"})
    with pytest.raises(ConfigError, match="--sglang-chunked-prefill-size must be positive, got -1"):
        checked(run_args | replay | {"--sglang-chunked-prefill-size": "-1"})


def test_routing_replay_is_refused_for_a_family_whose_experts_sglang_does_not_return(run_args):
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    kind = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "tie_word_embeddings": False}
    config = {name: value for name, value in HF_CONFIG.items() if name != "attention_bias"} | experts | kind
    (Path(str(run_args["--hf-checkpoint"])) / "config.json").write_text(json.dumps(config))
    assert checked(run_args).num_experts == 4
    with pytest.raises(ConfigError, match="SGLang 0.5.15 cannot return for mixtral: .*drop it"):
        checked(run_args | {"--use-rollout-routing-replay": None})


def test_engines_get_adapters_of_experts_merged(run_args):
    write_mixture(run_args["--hf-checkpoint"])
    args = run_args | {"--lora-rank": "4"}
    assert len(checked(args).lora.targets) == 4 and not checked(args).serves_adapters
    args |= {"--lora-weight-update": "adapters"}
    with pytest.raises(ConfigError, match="adapters of experts .linear_fc1 linear_fc2.; use .* merged, or --lora-t"):
        checked(args)
    assert checked(args | {"--lora-target-modules": "linear_qkv linear_proj"}).serves_adapters
    assert not checked(args | {"--debug-rollout-only": None}).serves_adapters


def test_what_sglang_does_not_serve_of_mixtures_is_refused(run_args):
    """Tied embeddings, and copies of GLM's routers in engines that the run did not start."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    config = HF_CONFIG | experts | {"model_type": "qwen3_moe", "tie_word_embeddings": True}
    path = Path(str(run_args["--hf-checkpoint"])) / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="no mixture of experts with tied embeddings"):
        checked(run_args)
    glm = {"n_routed_experts": 4, "attention_bias": True, "model_type": "glm4_moe", "tie_word_embeddings": False}
    path.write_text(json.dumps(config | glm))
    assert checked(run_args).moe_router_enable_expert_bias
    with pytest.raises(ConfigError, match="--rollout-external-urls: SGLang keeps a copy of this model's routers"):
        checked(run_args | {"--rollout-external-urls": "http://10.0.0.2:30000"})


def test_estimators_without_groups_take_one_response_and_a_critic_gets_its_folders(run_args):
    args = run_args | {"--n-samples-per-prompt": "1", "--save": "/tmp/no-such/x", "--load": "/tmp/no-such/y"}
    config = checked(args | {"--advantage-estimator": "reinforce_plus_plus"})
    assert [role.name for role in config.roles] == ["actor"] and not config.uses_critic
    config = checked(args | {"--advantage-estimator": "ppo", "--critic-num-gpus-per-node": "2"})
    assert config.save_folders == {"--save": "/tmp/no-such/x", "--critic-save": "/tmp/no-such/x/critic"}
    assert [role.config.load for role in config.roles] == ["/tmp/no-such/y", "/tmp/no-such/y/critic"]
    assert config.uses_critic
    assert [(roles, group.world_size) for roles, group in config.trainer_groups] == [("actor", 1), ("critic", 2)]
    assert [roles for roles, _ in checked(args | {"--advantage-estimator": "ppo"}).trainer_groups] == ["all"]


def test_a_run_of_no_rollouts_needs_none_for_the_policy(run_args):
    assert checked({**run_args, "--num-rollout": "0"}).num_rollout == 0


def test_a_schedule_over_epochs_is_checked_once_their_length_is_known(run_args):
    args = {**run_args, "--num-epoch": "3", "--lr-decay-style": "cosine", "--lr-warmup-iters": "9"}
    del args["--num-rollout"]
    config = checked(args)
    assert with_num_rollout(config, 13).num_rollout == 10  # 3 epochs, 4 rows a rollout
    with pytest.raises(ConfigError, match="schedule of 9"):
        with_num_rollout(config, 12)


@pytest.mark.parametrize(
    ("flags", "package"),
    [
        ({"--use-tensorboard": None}, "tensorboard"),
        ({"--prometheus-port": "9400"}, "prometheus-client"),
        ({"--rm-type": "math_verify"}, "math-verify"),
    ],
)
def test_a_package_that_a_flag_needs_is_named_where_it_is_missing(flags, package, run_args, monkeypatch):
    module = package.replace("-", "_")
    checks = sys.modules["slime_retool.config.validate"]  # the package has a function of this name
    monkeypatch.setattr(checks, "find_spec", lambda name: None if name == module else object())
    with pytest.raises(ConfigError, match=f"^{next(iter(flags))}.*: not installed; pip install {package}$"):
        checked(run_args | flags)


@pytest.mark.parametrize(
    ("flag", "megatron", "needed"),
    [
        ("--use-precision-aware-optimizer", "0.19.2", True),
        ("--optimizer-cpu-offload", "0.16.1", True),
        ("--optimizer-cpu-offload", "0.19.2", False),
    ],
)
def test_an_optimizer_that_needs_transformer_engine_is_refused_without(flag, megatron, needed, run_args, monkeypatch):
    checks = sys.modules["slime_retool.config.validate"]
    monkeypatch.setattr(checks, "find_spec", lambda name: None if name == "transformer_engine" else object())
    monkeypatch.setattr(checks.metadata, "version", lambda name: {"megatron-core": megatron}[name])
    args = run_args | {"--device": "cuda", flag: None}
    if needed:
        with pytest.raises(ConfigError, match=rf"^{flag}: not installed; pip install transformer-engine\[pytorch\]$"):
            checked(args)
    else:
        assert checked(args).optimizer_cpu_offload


def test_a_profiled_rollout_is_one_of_the_runs(run_args):
    checked(run_args | {"--num-rollout": "3", "--profile-rollout": "2"})
    with pytest.raises(ConfigError, match="--profile-rollout 3 is none of the run's 3 rollouts, which count from 0"):
        checked(run_args | {"--num-rollout": "3", "--profile-rollout": "3"})
    args = {**run_args, "--num-epoch": "3", "--profile-rollout": "10"}
    del args["--num-rollout"]
    config = checked(args)
    with pytest.raises(ConfigError, match="--profile-rollout 10 is none of the run's 10 rollouts"):
        with_num_rollout(config, 13)
    assert with_num_rollout(config, 17).num_rollout == 13


def test_sampling_from_a_cut_distribution_is_warned_about(run_args, caplog):
    checked(run_args)
    assert not caplog.records
    checked(run_args | {"--rollout-top-p": "0.7"})
    assert "--rollout-top-p 0.7" in caplog.text and "cut distribution" in caplog.text


def train_cli(*tokens: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "slime_retool.train", *tokens],
        cwd="/",
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"--rollout-temprature": "1"}, "unknown flag --rollout-temprature; did you mean --rollout-temperature?"),
        ({"--prompt-data": "/nowhere/x.jsonl"}, "no such file: /nowhere/x.jsonl"),
        (
            {"--actor-num-gpus-per-node": "3", "--tensor-model-parallel-size": "2"},
            "does not divide the 3 training processes",
        ),
        ({"--global-batch-size": "5"}, "must be a multiple of --global-batch-size 5"),
        ({"--sglang-api-key": "k"}, "--sglang-api-key cannot be passed through: --api-key is set from nothing"),
    ],
)
def test_the_command_line_ends_with_code_2_and_one_line(changes, expected: str, run_args):
    done = train_cli(*argv(run_args | changes))
    assert done.returncode == 2
    assert done.stdout == "" and done.stderr.count("\n") == 1 and expected in done.stderr


def test_help_is_grouped_and_complete():
    text = train_cli("--help").stdout
    for group in flags.groups_of(Config):
        title = group.__doc__.strip().splitlines()[0].rstrip(".")
        assert f"\n{title}:" in text
    for field in Config.__dataclass_fields__.values():
        if field.name not in ("sglang_server_flags", "hook_args"):
            assert re.search(rf"{re.escape(flags.option_name(field.name))}\b", text), field.name


def test_dry_run_prints_flags_that_parse_to_the_same_configuration(startable_args):
    args = startable_args | {"--dry-run": None}
    done = train_cli(*argv(args))
    assert done.returncode == 0, done.stderr
    assert parse_config(shlex.split(done.stdout.replace("\\\n", " "))[3:]) == checked(args)


def test_a_dry_run_refuses_what_the_start_would_and_writes_nothing(startable_args, tmp_path, capsys, caplog):
    Path(str(startable_args["--prompt-data"])).write_text('{"prompt": "1+1?", "label": "2"}\n{"prompt": "x"}\n{\n')
    args = startable_args | {"--dry-run": None, "--output-dir": f"{tmp_path}/out"}
    assert train(argv(args)) == 2
    out, error = capsys.readouterr()
    assert "data.jsonl, row 2: it has no label to compare with" in error and "(1 more of 3 rows" in error and not out
    assert train(argv(args | {"--skip-bad-rows": None})) == 0
    assert "2 rows cannot be used and would be left out, the first: " in caplog.text
    assert "--skip-bad-rows" in capsys.readouterr().out and not (tmp_path / "out").exists()


def test_a_dry_run_and_a_repr_hold_no_secret(startable_args):
    arguments = argv(startable_args | {"--wandb-key": "s3cret", "--wandb-name": "mine", "--dry-run": None})
    done = train_cli(*arguments)
    assert done.returncode == 0 and "--wandb-name mine" in done.stdout
    assert done.stderr == "slime_retool.train: --wandb-key is a secret and not printed\n"
    assert "s3cret" not in done.stdout + repr(parse_config(arguments))


def test_dry_run_prints_what_a_shell_takes_for_the_same_flags(run_args):
    stops = ["two words", "", "$HOME `x`", "it's", "\n"]
    config = parse_config([*argv(run_args), "--rollout-stop", *stops, "--sglang-served-model-name", "my model"])
    printed = " \\\n  ".join(["python -m slime_retool.train", *flag_lines(config)])
    script = f"python() {{ printf '%s\\0' \"$@\"; }}; {printed}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    tokens = done.stdout.split("\0")[:-1]
    assert parse_config(tokens[2:]) == config


@pytest.mark.parametrize("visible", ["", "-1", "-1,0", None, "0", "GPU-1,GPU-2"])
def test_a_gpu_that_the_environment_hides_is_not_used(visible: str | None, run_args, monkeypatch):
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([Path("/dev/nvidia0")]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    config = resolve(parse_config(argv(run_args | {"--device": "auto"})))
    assert config.device == ("cpu" if visible in ("", "-1", "-1,0") else "cuda")


def test_a_folder_without_permission_is_refused(run_args, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "access", lambda path, mode: path != str(tmp_path))  # tests may run as root
    with pytest.raises(ConfigError, match=f"--save {tmp_path}/a/b: no permission to write in {tmp_path}$"):
        checked(run_args | {"--save": f"{tmp_path}/a/b"})


def test_a_disk_without_room_for_a_checkpoint_is_refused(run_args, monkeypatch, tmp_path):
    config = checked(run_args | {"--save": f"{tmp_path}/a"})
    size = config.checkpoint_bytes()
    ppo = {"--advantage-estimator": "ppo", "--n-samples-per-prompt": "1"}
    both = checked(run_args | ppo).bytes_of_a_save
    asked = []

    def has(free: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: asked.append(path) or SimpleNamespace(free=free))

    has(size)
    assert checked(run_args | {"--save": f"{tmp_path}/a"}) and asked == [str(tmp_path)]
    has(size - 1)
    with pytest.raises(ConfigError, match=rf"--save {tmp_path}/a: a checkpoint takes 0\.0 GiB and 0\.0 GiB are free"):
        checked(run_args | {"--save": f"{tmp_path}/a"})
    assert checked(run_args | {"--save": f"{tmp_path}/a", "--no-save-optim": None})
    has(both - 1)  # a critic's lies beside it
    with pytest.raises(ConfigError, match=f"--save {tmp_path}/a: a checkpoint takes"):
        checked(run_args | ppo | {"--save": f"{tmp_path}/a"})
    has(both)
    assert checked(run_args | ppo | {"--save": f"{tmp_path}/a"})


@pytest.mark.parametrize("flag", ["--save", "--critic-save"])
def test_halves_of_master_weights_are_not_saved(flag, run_args, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["slime_retool.config.validate"], "find_spec", lambda name: object())
    args = run_args | {
        "--device": "cuda", "--use-precision-aware-optimizer": None,
        "--advantage-estimator": "ppo", "--n-samples-per-prompt": "1",
    }  # fmt: skip
    assert checked(args).use_precision_aware_optimizer
    with pytest.raises(ConfigError, match=f"^{flag} .*--use-precision-aware-optimizer keeps .*; add --no-save-optim"):
        checked(args | {flag: f"{tmp_path}/a"})
    assert checked(args | {flag: f"{tmp_path}/a", "--no-save-optim": None}).no_save_optim
    assert checked(args | {flag: f"{tmp_path}/a", "--optimizer-cpu-offload": None}).save_folders  # has whole ones


@pytest.mark.parametrize("flag", [{"--use-kl-loss": None}, {"--kl-coef": "0.1"}])
def test_a_kl_term_needs_its_reference(run_args, flag):
    args = {**run_args, **flag, "--load": run_args["--ref-load"]}
    checked(args)
    del args["--ref-load"]
    with pytest.raises(ConfigError, match=f"{next(iter(flag))} needs the reference model: add --ref-load DIR"):
        checked(args)


def test_checkpoints_do_not_take_the_references_place(run_args, tmp_path):
    (tmp_path / "link").symlink_to(run_args["--ref-load"])
    for folder in (f"{run_args['--ref-load']}/", f"{tmp_path}/link", f"{tmp_path}/x/../ref"):
        with pytest.raises(ConfigError, match="is --ref-load: the first checkpoint would take the reference's place"):
            checked(run_args | {"--save": folder})
    assert checked(run_args | {"--save": f"{run_args['--ref-load']}/new"}).save


def test_one_checkpoint_of_several_is_a_reference_and_nothing_to_go_on_from(run_args, tmp_path):
    one = Path(run_args["--ref-load"]) / "iter_0000003"
    one.mkdir()
    (one / ".metadata").touch()
    named = run_args | {"--ref-load": str(one)}
    assert checked(named).ref_load == str(one)
    with pytest.raises(ConfigError, match=f"--load {one} is one checkpoint: give the folder that it is in"):
        checked(run_args | {"--load": str(one)})
    with pytest.raises(ConfigError, match=f"--critic-load {one} is one checkpoint"):
        checked(run_args | {"--advantage-estimator": "ppo", "--critic-load": str(one)})
    with pytest.raises(ConfigError, match="--save .*iter_0000003 is --ref-load"):
        checked(named | {"--save": str(one)})
    same = named | {"--load": str(one.parent), "--save": str(one.parent)}
    assert checked(same).save
    with pytest.raises(ConfigError, match="--save-keep would delete --ref-load"):
        checked(same | {"--save-keep": "2"})


OTHER_KINDS = {
    "adapters for the model": ("--hf-checkpoint", "adapter_config.json", "holds LoRA adapters in PEFT's format"),
    "adapters for the reference": ("--ref-load", "adapter_config.json", "holds LoRA adapters in PEFT's format"),
    "Megatron's for the model": ("--hf-checkpoint", "latest_checkpointed_iteration.txt", "slime-retool convert to-hf"),
    "Hugging Face's for the reference": ("--ref-load", "config.json", "slime-retool convert to-megatron"),
    "Hugging Face's to go on from": ("--load", "config.json", "slime-retool convert to-megatron"),
}


@pytest.mark.parametrize("case", OTHER_KINDS)
def test_a_checkpoint_of_another_kind_is_refused_and_named(case: str, run_args, tmp_path):
    flag, file, message = OTHER_KINDS[case]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / file).write_text("{}")
    with pytest.raises(ConfigError, match=rf"^{flag}: {tmp_path}/other has no .*{message}"):
        checked(run_args | {flag: f"{tmp_path}/other"})


def test_a_name_of_the_hub_is_answered_with_how_to_download_it(run_args, tmp_path, monkeypatch):
    download = "hf download Qwen/Qwen3-4B --local-dir Qwen3-4B"
    with pytest.raises(ConfigError, match=f"^--hf-checkpoint: no such folder: Qwen/Qwen3-4B.*{download}$"):
        checked(run_args | {"--hf-checkpoint": "Qwen/Qwen3-4B"})
    with pytest.raises(ConfigError, match=download):
        load_tokenizer("Qwen/Qwen3-4B")
    with pytest.raises(ValueError, match=download):
        read_hf_config("Qwen/Qwen3-4B")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen").mkdir()  # a mistyped folder of one's own
    with pytest.raises(ConfigError, match="no such folder: Qwen/Qwen3-4B$"):
        checked(run_args | {"--hf-checkpoint": "Qwen/Qwen3-4B"})


@pytest.mark.parametrize("left", ["latest_checkpointed_iteration.txt", "iter_0000004/.metadata"])
def test_a_run_does_not_save_among_the_checkpoints_of_one_that_it_does_not_go_on_from(left: str, run_args, tmp_path):
    saved = tmp_path / "saved" / left
    saved.parent.mkdir(parents=True)
    saved.write_text("4")
    save = {"--save": f"{tmp_path}/saved"}
    ppo = {"--advantage-estimator": "ppo", "--n-samples-per-prompt": "1"}
    refused = rf"{tmp_path}/saved holds the checkpoints of an earlier run.*add --load {tmp_path}/saved to go on"
    for changes in (save, save | {"--load": f"{tmp_path}/other"}):
        with pytest.raises(ConfigError, match=f"--save {refused}"):
            checked(run_args | changes)
    with pytest.raises(ConfigError, match=f"--critic-save {refused.replace('--load', '--critic-load')}"):
        checked(run_args | ppo | {"--critic-save": f"{tmp_path}/saved"})
    (tmp_path / "link").symlink_to(tmp_path / "saved")
    assert checked(run_args | save | {"--load": f"{tmp_path}/link"}).save
    # The same command once more, whose critic began in a folder of its own: it is where the run saved it.
    again = run_args | ppo | save | {"--load": f"{tmp_path}/saved", "--critic-load": f"{tmp_path}/values"}
    critic = tmp_path / "saved" / "critic"
    (critic / "iter_0000009").mkdir(parents=True)
    with pytest.raises(ConfigError, match=f"--critic-save {tmp_path}/saved/critic holds the checkpoints of an earlier"):
        checked(again)
    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("4")
    (critic / "iter_0000004").mkdir()
    assert checked(again).critic_places[0] == str(critic)
    assert checked(run_args | save | {"--debug-rollout-only": None}).save


def test_an_evaluation_may_have_more_gpus_than_prompts(run_args):
    more = {"--actor-num-gpus-per-node": "8", "--colocate": None, "--rollout-batch-size": "1", "--num-rollout": "0"}
    assert checked(run_args | more | {"--debug-rollout-only": None, "--n-samples-per-prompt": "1"}).num_engines == 8


def test_the_advice_on_a_batch_is_one_that_passes(run_args):
    for ranks, changes in ((3, {}), (5, {}), (3, {"--n-samples-per-prompt": "5"}), (8, {"--global-batch-size": "4"})):
        args = run_args | {"--actor-num-gpus-per-node": str(ranks)} | changes
        with pytest.raises(ConfigError) as caught:
            checked(args)
        advice = re.search(r"use (--\S+) (\d+)$", str(caught.value))
        assert advice is not None
        checked(args | {advice[1]: advice[2]})


@pytest.mark.parametrize("command", ["eval", "plan"])
def test_help_of_a_command_shows_how_that_command_is_called(command: str, capsys):
    with pytest.raises(SystemExit):
        slime_retool([command, "--help"])
    assert capsys.readouterr().out.startswith(f"usage: slime-retool {command} ")


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ("--rollout-num-gpus 4 --rollout-num-gpus-per-engine 3", "3 does not divide the 4 GPUs used for generation"),
        ("--global-batch-size 7", "must be a multiple of --global-batch-size 7"),
        ("--micro-batch-size 0", "--micro-batch-size must be at least 1, got 0"),
        ("--n-samples-per-prompt 0", "--n-samples-per-prompt must be at least 1, got 0"),
        ("--mean-response -5", "--mean-response must be at least 1, got -5"),
        ("--sglang-mem-fraction-static 2", "--sglang-mem-fraction-static must be above 0 and below 1, got 2.0"),
    ],
)
def test_a_plan_refuses_what_the_run_would(wrong: str, expected: str, run_args, capsys):
    words = ["--hf-checkpoint", str(run_args["--hf-checkpoint"]), "--rollout-batch-size", "4", *wrong.split()]
    assert slime_retool(["plan", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("slime-retool plan: error: ") and expected in error and error.count("\n") == 1


def test_a_plan_without_a_model_says_so(capsys):
    assert slime_retool(["plan", "--rollout-batch-size", "4"]) == 2
    assert (
        "no model to plan: give the flags of one (scripts/models/*.sh), or --hf-checkpoint" in capsys.readouterr().err
    )


def test_every_flag_is_declared_in_one_group():
    names = [name for group in Config.__mro__[1:] for name in group.__dict__.get("__annotations__", {})]
    assert sorted(names) == sorted(set(names))
