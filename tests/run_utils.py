"""What whole runs start from: a tiny model in both formats, prompts, and the values of a short RL run."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from sglang_utils import make_tiny_checkpoint

from megatron_bridge.checkpoint import checkpoint_name, write_latest
from megatron_bridge.convert import convert_hf_to_torch_dist
from megatron_bridge.hf_config import model_args_from_hf, read_hf_config


def heed_interrupts() -> None:
    """A shell starts its background jobs with SIGINT ignored, and all their children inherit that: for `preexec_fn`."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def make_model(folder: Path) -> Path:
    """Fill `folder`: hf/, torch_dist/ and prompts.jsonl."""
    make_tiny_checkpoint(folder / "hf")
    args = model_args_from_hf(read_hf_config(folder / "hf"))
    convert_hf_to_torch_dist(args, folder / "hf", folder / "torch_dist", progress=False)
    rows = [{"prompt": [{"role": "user", "content": f"{n} + 1?"}], "label": str(n + 1)} for n in range(32)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def make_checkpoint(root: Path, rollout_id: int) -> None:
    """What stands for a whole checkpoint, as far as can be seen without loading it."""
    folder = root / checkpoint_name(rollout_id)
    folder.mkdir(parents=True)
    for name in (".metadata", "metadata.json"):
        (folder / name).touch()
    write_latest(root, rollout_id)


def rl_values(model: Path, output: Path) -> dict[str, object]:
    return {
        "ref_load": str(model / "torch_dist"),
        "prompt_data": str(model / "prompts.jsonl"),
        "custom_rm_path": "e2e_hooks.alternating_reward",
        "num_rollout": 2,
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 4,
        "rollout_max_response_len": 24,
        "rollout_max_context_len": 256,
        "lr": 1e-3,
        "output_dir": str(output),
    }
