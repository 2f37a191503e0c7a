"""A tiny Qwen3 checkpoint and a real SGLang engine for tests (about 20 s to start on a CPU)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from slime_retool.config import Config

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes as tokens 0..255, then `<|im_end|>` 256 (ends a turn), `<|endoftext|>` 257, `<|im_start|>` 258."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", clean_up_tokenization_spaces=False
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_tiny_checkpoint(folder: Path, *, seed: int = 0, tie: bool = True, experts: int = 0) -> Path:
    """Write a random 2-layer Qwen3 (grouped K/V heads, odd vocabulary size 259) and its tokenizer to `folder`.

    `experts` > 0: a mixture of so many of width 32, two for each token.
    """
    tokenizer = tiny_tokenizer()
    torch.manual_seed(seed)
    sizes: dict[str, Any] = dict(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        tie_word_embeddings=tie,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model: Any
    if experts:
        mixture = dict(num_experts=experts, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True)
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **mixture))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**sizes))
    with torch.no_grad():
        for parameter in model.parameters():  # sharper than the default init, so that log-probs differ visibly
            if parameter.dim() > 1:
                parameter.mul_(6.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def engine_config(checkpoint: Path, output_dir: Path, **overrides: object) -> Config:
    """A CPU configuration for one small engine on `checkpoint`."""
    values: dict[str, object] = {
        "device": "cpu",
        "hf_checkpoint": str(checkpoint),
        "output_dir": str(output_dir),
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 2,
        "rollout_max_response_len": 64,
        "rollout_max_context_len": 512,
        "sglang_max_total_tokens": 16384,
        "sglang_startup_timeout": 600.0,
        "sglang_server_concurrency": 64,
        "no_progress": True,
    }
    return Config(**{**values, **overrides})


def processes_with(mark: str) -> dict[int, str]:
    """Living processes (id -> command) whose environment holds `mark` ("NAME=value")."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:  # it ended meanwhile
                continue
    return found


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    """Of those that may end with one another."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
