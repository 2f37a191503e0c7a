"""Whole runs of the command line with --max-staleness 1 on the real SGLang: each token against its own weights."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from run_utils import make_model
from test_end_to_end_runs import assert_nothing_left, command, start
from transformers import AutoModelForCausalLM

from megatron_bridge.checkpoint import LATEST_FILE
from megatron_bridge.convert import convert_torch_dist_to_hf
from slime_retool.metrics import read_metrics
from slime_retool.types import NO_VERSION

pytestmark = pytest.mark.timeout(1200)

LAYOUTS = {
    "in turns": ["--colocate", "--offload-train", "--offload-rollout"],
    "in turns, the cache kept": ["--colocate", "--offload-train", "--offload-rollout", "--no-offload-rollout-cache"],
    "side by side": [],
}
STEPS = 5


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def log_probs_of(model: Path, rows: list[dict[str, Any]]) -> dict[int, torch.Tensor]:
    """Log-prob of each response token of each sample under a Hugging Face checkpoint, by sample."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    found = {}
    with torch.no_grad():
        for row in rows:
            tokens = torch.tensor(row["tokens"])
            logits = network(tokens[None]).logits[0, :-1].log_softmax(-1)
            every = logits.gather(1, tokens[1:, None])[:, 0]
            found[row["index"]] = every[len(tokens) - row["response_length"] - 1 :]
    return found


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Random text holds line separators of other kinds than the file's own."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_generation_goes_on_across_updates(layout: str, model: Path, tmp_path: Path):
    values = {
        "save": tmp_path / "save", "save_interval": 1, "max_staleness": 1, "num_rollout": STEPS, "eval_interval": 2,
        "rollout_max_response_len": 160,
    }  # fmt: skip
    arguments = command(model, tmp_path / "out", **values)
    switches = ["--use-tis", "--dump-rollouts", "--no-progress", *LAYOUTS[layout]]
    process, run = start([*arguments, *switches, "--eval-prompt-data", "small", str(model / "prompts.jsonl")])
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 0, output
    assert "failed at the engine" not in output
    assert_nothing_left(run)

    metrics = {row["step"]: row for row in read_metrics(tmp_path / "out" / "metrics.jsonl")}
    steps = [metrics[step] for step in range(STEPS)]
    assert [row["rollout/weight_version"] for row in steps] == [2, 3, 4, 5, 6]
    assert max(row["rollout/staleness_max"] for row in steps) == 1
    assert all(row["rollout/groups_dropped_stale"] == 0 for row in steps)
    continued = sum(row["rollout/requests_continued"] for row in steps)
    reread = sum(row["rollout/reread_tokens"] for row in steps)
    assert continued > 0
    # In turns the engine's cache is gone, unless it is kept: prompts are read again, each for several samples.
    assert reread > 4 * continued if layout == "in turns" else reread <= 2 * continued
    evaluated = read_lines(tmp_path / "out" / "eval" / "small_000001.jsonl")
    assert {v for row in evaluated for v in row["token_versions"]} == {3}

    rows = [
        (step, row)
        for step in range(STEPS)
        for row in read_lines(tmp_path / "out" / "rollouts" / f"rollout_{step:06d}.jsonl")
    ]
    indices = [row["index"] for _, row in rows]
    assert len(indices) == len(set(indices)) == STEPS * 16
    assert set(Counter(row["group_index"] for _, row in rows).values()) == {4}

    exact, apart, mixed = check_log_probs(model, tmp_path, rows)
    assert mixed > 0
    if layout == "in turns":  # with the cache kept, what follows an update was written on what older weights had read
        assert exact < 1e-3
    assert apart > 3e-3  # the weights of one version are not those of the next


def check_log_probs(model: Path, folder: Path, rows: list[tuple[int, dict[str, Any]]]) -> tuple[float, float, int]:
    """(largest error under a token's own weights, mean difference under the version after, samples over updates).

    Tokens before a sample's first update are always exact.
    """
    versions = {}
    for version in range(1, STEPS + 1):
        checkpoint = model / "hf"
        if version > 1:
            (folder / "save" / LATEST_FILE).write_text(str(version - 2))
            checkpoint = folder / f"hf_{version}"
            convert_torch_dist_to_hf(folder / "save", checkpoint, model / "hf", progress=False)
        versions[version] = log_probs_of(checkpoint, [row for _, row in rows])
    exact, apart, mixed = 0.0, [], 0
    for step, row in rows:
        used = set(row["token_versions"]) - {NO_VERSION}
        assert used <= {step, step + 1}
        mixed += len(used) > 1
        for place, (version, log_prob) in enumerate(zip(row["token_versions"], row["rollout_log_probs"], strict=True)):
            if version != NO_VERSION:
                error = abs(float(versions[version][row["index"]][place]) - log_prob)
                exact = max(exact, error)
                assert version > min(used) or error < 1e-3
                if version < STEPS:
                    apart.append(abs(float(versions[version + 1][row["index"]][place]) - log_prob))
    return exact, sum(apart) / len(apart), mixed
