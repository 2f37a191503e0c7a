"""Every example of docs/extending.md is taken from the page, and does what the page says."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch
from algo_reference import Array, Batch, numeric_gradient, random_batch
from dist_utils import run_distributed
from test_config import argv, run_args  # noqa: F401
from test_train_loop import Parts
from tool_helpers import ScriptedEngine, tokenizer
from trainer_utils import make_trainer, random_samples, tiny_config, weights

from slime_retool.algo.advantages import AdvantageInputs, compute_advantages
from slime_retool.algo.losses import LossInputs, TotalLoss
from slime_retool.config import Config, parse_config, resolve, validate
from slime_retool.errors import ConfigError, RewardError
from slime_retool.metrics import read_metrics
from slime_retool.rollout.context import RolloutContext, use_context
from slime_retool.rollout.hooks import Hooks
from slime_retool.train import Loop, trackers_of
from slime_retool.types import RolloutBatch, Sample, SampleStatus

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
TITLES = (
    "An advantage estimator", "A loss", "An estimator with a loss of its own, in the product", "A model family",
    "A tool", "A reward", "A weight transport", "A tracker",
)  # fmt: skip
LONGEST_EXAMPLE = 40


def blocks(title: str) -> dict[str, str]:
    """The code blocks of a section by language, of each one."""
    (section,) = re.findall(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    found = re.findall(r"^```(\w+)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert len(found) == len(dict(found)), f"two blocks of one language in {title!r}"
    return dict(found)


def words(title: str) -> list[str]:
    """The command line of a section, from the first flag on."""
    line = shlex.split(blocks(title)["bash"].replace("\\\n", ""))
    return line[next(i for i, word in enumerate(line) if word.startswith("--")) :]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path with the page's modules in it, as a user would place them."""
    place = tmp_path / "mine"
    place.mkdir()
    for title in TITLES:
        if source := blocks(title).get("python"):
            (place / source.splitlines()[0].removeprefix("# ")).write_text(source)
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "retool"))
    monkeypatch.syspath_prepend(str(place))
    yield place
    for module in place.glob("*.py"):
        sys.modules.pop(module.stem, None)


def test_every_section_has_one_short_example_and_a_command_line():
    assert re.findall(r"^## (.*)$", PAGE, re.MULTILINE) == list(TITLES)
    for title in TITLES:
        (language,) = blocks(title).keys() - {"bash"}
        assert language in ("python", "diff")
        assert len(blocks(title)[language].splitlines()) <= LONGEST_EXAMPLE, title
        assert "bash" in blocks(title)


def test_the_table_leads_to_every_section_and_to_contracts_that_are_there():
    anchors = ["#" + re.sub(r"[^a-z ]", "", title.lower()).replace(" ", "-") for title in TITLES]
    rows = re.findall(r"^\| \[.*?\]\((#.*?)\) \| .*? \| (.*?) \|$", PAGE, re.MULTILINE)
    assert [anchor for anchor, _ in rows] == anchors
    named = {path for _, contract in rows for path in re.findall(r"`(.*?)`", contract)}
    named |= set(re.findall(r"`((?:slime_retool|megatron_bridge|tests)/[\w/]+\.py)`", PAGE))
    assert [path for path in named if not any((root / path).is_file() for root in (ROOT, ROOT / "slime_retool"))] == []


@pytest.mark.parametrize("title", [title for title in TITLES if "python" in blocks(title)])
def test_the_command_line_passes_all_rules_and_a_mistaken_path_is_refused(
    title: str,
    folder: Path,
    run_args: dict[str, str | None],  # noqa: F811
):
    line = words(title)
    validate(resolve(parse_config([*argv(run_args), *line])))
    path = next(word for word in line if word.startswith("my_"))
    with pytest.raises(ConfigError, match=f"module '{path.partition('.')[0]}' has no .* 'nothing'"):
        mistaken = [f"{path.partition('.')[0]}.nothing" if word == path else word for word in line]
        validate(resolve(parse_config([*argv(run_args), *mistaken])))


# Estimators and losses


def by_sample(batch: Batch, flat: torch.Tensor) -> list[Array]:
    return np.split(flat.detach().double().numpy(), np.cumsum([len(mask) for mask in batch.masks])[:-1])


def assert_value_and_gradient(batch: Batch, reference: Any, value: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """`reference(rows of log-probs)` in plain loops has the value and, by central differences, the gradient."""
    rows = batch.fields["log_probs"]
    assert float(value) == pytest.approx(reference(rows), abs=1e-9)
    assert gradient is not None
    want = numeric_gradient(reference, [row.copy() for row in rows], batch.masks)
    np.testing.assert_allclose(gradient.numpy(), np.concatenate(want), atol=1e-6, rtol=1e-6)


def over_tokens(batch: Batch, token: Any) -> float:
    """Sum of `token(sample, position)` over learned tokens, weighted as by default."""
    token_weights = batch.weights(per_token=False)
    return math.fsum(
        token_weights[i][t] * token(i, t) for i, mask in enumerate(batch.masks) for t in np.flatnonzero(mask)
    )


def flat_weights(batch: Batch) -> torch.Tensor:
    return torch.tensor(np.concatenate(batch.weights(per_token=False)))


@pytest.mark.parametrize("seed", range(6))
def test_the_estimator_gives_rewards_less_their_groups_median(seed: int, folder: Path):
    config, batch = parse_config(words(TITLES[0])), random_batch(seed)
    inputs = AdvantageInputs(
        batch.segments, torch.tensor(batch.rewards), torch.tensor(batch.groups), values=None, args=config
    )
    found = by_sample(batch, compute_advantages(config.algorithm, inputs).advantages)
    for i, mask in enumerate(batch.masks):
        own = [reward for reward, group in zip(batch.rewards, batch.groups, strict=True) if group == batch.groups[i]]
        np.testing.assert_allclose(found[i], mask * (batch.rewards[i] - median(own)), atol=1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_the_loss_has_the_papers_value_and_gradient(seed: int, folder: Path):
    config, batch = parse_config(words(TITLES[1])), random_batch(seed)
    old, advantages = batch.fields["old"], batch.fields["advantages"]

    def gate(new: list[Array], i: int, t: int) -> float:
        tau = 1.0 if advantages[i][t] > 0 else 1.05
        return 4 / tau / (1 + math.exp(-tau * (math.exp(new[i][t] - old[i][t]) - 1)))

    log_probs = batch.flat("log_probs").requires_grad_()
    columns = {"old_log_probs": batch.flat("old"), "advantages": batch.flat("advantages")}
    inputs = LossInputs(
        weights=flat_weights(batch), columns=columns, log_probs=log_probs, entropy=torch.zeros(len(log_probs))
    )
    loss, metrics = TotalLoss(config.loss_terms)(inputs)
    loss.backward()
    assert_value_and_gradient(
        batch,
        lambda new: over_tokens(batch, lambda i, t: -advantages[i][t] * gate(new, i, t)),
        loss.detach(),
        log_probs.grad,
    )
    mean = over_tokens(batch, lambda i, t: gate(batch.fields["log_probs"], i, t))
    assert float(metrics["gate"]) == pytest.approx(mean, abs=1e-9)


# Changes of the product


def changed_copy(title: str, tmp_path: Path) -> Path:
    """A copy of the packages with a section's diff."""
    diff, place = blocks(title)["diff"], tmp_path / "copy"
    assert 1 <= len(re.findall(r"^\+\+\+ b/", diff, re.MULTILINE)) <= 2
    for package in ("slime_retool", "megatron_bridge", "tools"):
        shutil.copytree(ROOT / package, place / package, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "change.diff").write_text(diff)
    git = ["git", "apply", "--unsafe-paths", f"--directory={place}", str(tmp_path / "change.diff")]
    applied = subprocess.run(git, cwd=tmp_path, capture_output=True, text=True)
    assert applied.returncode == 0, applied.stderr
    return place


def run_there(place: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(place), str(ROOT / "tests")])
    return subprocess.run(
        [sys.executable, *command], cwd=place, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )


def check_there(place: Path, name: str, results: Path) -> None:
    done = run_there(place, [str(ROOT / "tests" / "extending_checks.py"), name, str(results)])
    assert done.returncode == 0, done.stderr


def test_the_products_new_estimator_and_loss(tmp_path: Path):
    batch = random_batch(4)
    given = {"words": words(TITLES[2]), "lengths": batch.segments.lengths, "mask": batch.mask}
    given |= {"rewards": torch.tensor(batch.rewards), "groups": torch.tensor(batch.groups)}
    given |= {"log_probs": batch.flat("log_probs"), "weights": flat_weights(batch)}
    torch.save(given, tmp_path / "batch.pt")
    check_there(changed_copy(TITLES[2], tmp_path), "opo", tmp_path)
    found = torch.load(tmp_path / "result.pt")

    lengths = [int(mask.sum()) for mask in batch.masks]
    advantages = []
    for i, group in enumerate(batch.groups):
        own = [j for j, other in enumerate(batch.groups) if other == group]
        total = sum(lengths[j] for j in own)
        advantages.append(batch.rewards[i] - sum(lengths[j] * batch.rewards[j] for j in own) / max(total, 1))
    assert len(set(batch.groups)) > 1 and len(set(np.round(advantages, 6))) > 2
    rows = by_sample(batch, found["advantages"])
    for i, row in enumerate(rows):
        np.testing.assert_allclose(row, batch.masks[i] * advantages[i], atol=1e-6)
    assert_value_and_gradient(
        batch, lambda new: over_tokens(batch, lambda i, t: -rows[i][t] * new[i][t]), found["loss"], found["gradient"]
    )
    assert found["metrics"].keys() == {"loss", "pg_loss", "entropy"}
    assert "opo, rewards less the group's length-weighted mean" in " ".join(found["help"].split())


HF_MISTRAL = {
    "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32768, "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-05, "tie_word_embeddings": False, "hidden_act": "silu", "sliding_window": None,
}  # fmt: skip
"""config.json of Mistral-7B-Instruct-v0.3, but for what no flag holds."""


def test_a_new_family_converts_there_and_back_and_computes_what_transformers_does(tmp_path: Path):
    place = changed_copy(TITLES[3], tmp_path)
    check_there(place, "mistral", tmp_path)
    theirs, ours = torch.load(tmp_path / "logits.pt")
    assert theirs.std() > 0.5
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    # What the page's command line says of the whole model is compared with its config.json.
    for number, (window, said) in enumerate([(None, ""), (4096, "sliding_window 4096 is not supported")]):
        hf = tmp_path / f"Mistral-{number}"
        hf.mkdir()
        (hf / "config.json").write_text(json.dumps(HF_MISTRAL | {"sliding_window": window}))
        command = [str(hf) if word.startswith("Mistral-7B-I") else word for word in words(TITLES[3])]
        done = run_there(place, [str(place / "tools" / "convert_hf_to_torch_dist.py"), *command])
        assert done.returncode != 0 and (said or "safetensors") in done.stderr and "config.json is" not in done.stderr


# Hooks


def test_the_tool_is_called_in_a_conversation(folder: Path):
    (folder / "physics.json").write_text('{"quark": "What a proton is made of."}')
    line = words(TITLES[4])
    config = parse_config([*line[:-1], str(folder / line[-1]), "--rollout-max-response-len", "4000"])
    calls = [json.dumps({"name": "look_up", "arguments": {"word": word}}) for word in ("Quark", "quarx")]
    turns = "".join(f"<tool_call>{call}</tool_call>" for call in calls)
    engine = ScriptedEngine([(turns, "stop"), ("It is in a proton.", "stop")])
    sample = Sample(prompt=[{"role": "user", "content": "What is a quark?"}])

    async def main() -> None:
        context = RolloutContext(config, tokenizer(), engine)
        async with use_context(context):
            await Hooks.load(config).generate(config, sample, {})
        await context.aclose()

    asyncio.run(main())
    assert sample.status is SampleStatus.COMPLETED
    for answer in ("What a proton is made of.", "Error: quarx is not in the glossary."):
        assert f"<tool_response>\n{answer}\n</tool_response>" in sample.response
    assert (sample.num_tool_calls, sample.num_tool_errors, sample.num_malformed_calls) == (2, 1, 0)
    assert "What a word means." in tokenizer().decode(sample.tokens[: sample.prompt_length])


def test_the_reward_scores_by_its_own_flag(folder: Path):
    config = parse_config(words(TITLES[5]))
    reward = Hooks.load(config).reward

    def score(response: str, label: str = "200") -> dict[str, Any]:
        sample = Sample("How many?", label=label, response=response)
        sample.reward = asyncio.run(reward(config, sample))
        assert sample.reward_value(config.reward_key) == sample.reward["score"]
        return sample.reward

    assert score("First 7, then 203.9 m") == {"score": 1.0, "acc": True, "pred": "203.9"}  # --tolerance 0.02: 4
    assert score("206")["score"] == pytest.approx(0.5) and score("-300")["score"] == 0.0
    assert score("none") == {"score": 0.0, "acc": False, "pred": ""}
    assert score("0", label="0")["acc"] and not score("1", label="0")["acc"]
    with pytest.raises(RewardError, match="could not convert"):
        score("1", label="many")


# Trainer and engines


class StandIn(BaseHTTPRequestHandler):
    """An engine on another host, whose files lie below `root`."""

    root: Path
    asked: list[str]
    loaded: dict[str, torch.Tensor]

    def do_POST(self) -> None:
        from safetensors.torch import load_file

        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        path = urlsplit(self.path).path
        self.asked.append(path)
        if path == "/update_weights_from_disk":
            place = self.root / body["model_path"].removeprefix("/")
            weight_map = json.loads((place / "model.safetensors.index.json").read_text())["weight_map"]
            files = {file: load_file(place / file) for file in set(weight_map.values())}
            self.loaded |= {name: files[file][name] for name, file in weight_map.items()}
        self._reply(b"{}")

    def do_GET(self) -> None:
        self._reply(b'{"load_format": "auto"}')

    def _reply(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None: ...


def train_and_send(rank: int, world_size: int, flags: dict[str, Any], root: str) -> dict[str, Any]:
    """Train a step, send the weights to a stand-in, and again with an engine's host that is gone."""
    from slime_retool.errors import WeightUpdateError
    from slime_retool.trainer.weight_sync import WeightSync

    config = tiny_config(
        **flags, tensor_model_parallel_size=2, n_samples_per_prompt=3, rollout_batch_size=2,
        update_weight_buffer_size=20_000, output_dir=root,
    )  # fmt: skip
    trainer = make_trainer(rank, world_size, config)
    metrics = trainer.train(RolloutBatch(random_samples()), 0)
    StandIn.root, StandIn.asked, StandIn.loaded = Path(root), [], {}
    server = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sync = WeightSync(trainer, [f"http://127.0.0.1:{server.server_port}"])
    version, sent, asked = sync.update(), weights(trainer), list(StandIn.asked)
    arrived = {name: tensor.clone() for name, tensor in StandIn.loaded.items()}
    os.environ["PATH"] = str(Path(root) / "nothing")
    try:
        sync.update()
        refused = "accepted"
    except WeightUpdateError as error:
        refused = str(error)
    server.shutdown()
    trainer.shutdown()
    found = {"metrics": metrics, "version": version, "refused": refused, "asked": asked}
    return found | {"same": arrived.keys() == sent.keys() and all(torch.equal(arrived[n], sent[n]) for n in sent)}


def test_a_trainer_uses_the_estimator_and_the_loss_and_the_transport_delivers_its_weights(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = parse_config([*words(TITLES[0]), *words(TITLES[1]), *words(TITLES[6])])
    programs, root = tmp_path / "bin", tmp_path / "engine"
    programs.mkdir()
    # Stands for rsync over SSH: the host 127.0.0.1 has its files below `root`.
    script = f'#!/bin/sh\nset -e\nto="{root}${{4#127.0.0.1:}}"\nrm -rf "$to"\nmkdir -p "$to"\ncp -r "$3." "$to"\n'
    (programs / "rsync").write_text(script)
    (programs / "rsync").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    names = ("advantage_estimator", "loss_type", "update_weight_transport")
    flags = {name: config.__dict__[name] for name in names}
    assert config.num_engines == 2 and config.weight_transport == "my_transport.Rsync"
    first, second = run_distributed(train_and_send, 2, flags, str(root))
    assert first["same"] and first["version"] == second["version"] == 1
    around = ["/pause_generation", "/flush_cache", "/update_weights_from_disk", "/update_weight_version"]
    assert first["asked"] == [*around, "/continue_generation"] and second["asked"] == []
    assert all("weight update 2 failed: FileNotFoundError" in one["refused"] for one in (first, second))
    assert first["metrics"]["train/gate"] == pytest.approx(4 * 0.5, rel=0.05)  # on policy: 4 sigmoid(0) / tau
    assert first["metrics"]["train/loss"] == pytest.approx(first["metrics"]["train/pg_loss"])


def test_the_tracker_is_told_the_metrics_of_every_step(folder: Path, tmp_path: Path):
    line = words(TITLES[7])
    config = parse_config([*line[:-1], str(tmp_path / line[-1]), "--output-dir", str(tmp_path), "--no-progress"])
    parts = Parts()
    parts.train = lambda batch, rollout_id: {"train/loss": 1.5 - rollout_id, "train/grad_norm": math.nan}
    metrics = trackers_of(config)
    Loop(Config(**{**config.__dict__, "num_rollout": 2}), parts, parts, metrics).run()
    metrics.close()
    rows = sqlite3.connect(tmp_path / "runs.db").execute("SELECT step, name, value FROM metrics").fetchall()
    told: dict[int, dict[str, Any]] = {}
    for step, name, value in rows:
        told.setdefault(step, {"step": step})[name] = value
    written = [{name: row[name] for name in row if name != "time"} for row in read_metrics(tmp_path / "metrics.jsonl")]
    assert [told[step] for step in sorted(told)] == written
    assert [row["train/loss"] for row in written] == [1.5, 0.5] and written[0]["train/grad_norm"] is None
