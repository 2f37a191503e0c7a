"""Make the quickstart's base model: a tiny Qwen3 with its own tokenizer, as a Hugging Face checkpoint.

    python examples/quickstart/base_model.py --output-dir DIR [--seed N]

About a million parameters, weights drawn at random from the seed: it knows nothing, and SFT has to teach
it everything. Two layers and width 128 learn to copy numbers in fewer steps than four layers do.

The tokenizer is a byte-level BPE trained here on conversations rendered with the quickstart's chat template.
Digits are always single tokens, so that numbers can be copied digit by digit. Newlines are too, so that a
prompt ending in "assistant\\n" is a prefix of the whole conversation in tokens as well as in text. Other text
may merge across words: a phrase of the fixed prompt costs one token. Whatever was not seen here falls back to
bytes.

Every size that tensor or pipeline parallelism of 2 divides is even: heads, key/value heads, layers and
vocabulary.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from problems import generate_problems
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from traces import TOOLS, direct_trace, tool_trace
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.chat_template_utils import render_jinja_template

CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja").read_text()
# As in Qwen's tokenizers: the turn markers vanish when decoding with skip_special_tokens, the tool tags stay.
TURN_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TOOL_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# What a sandbox says about code that fails; a few merges keep such observations short.
ERROR_TEXTS = (
    'Traceback (most recent call last):\n  File "<string>", line 1, in <module>\n',
    "SyntaxError: invalid syntax",
    "NameError: name 'n' is not defined",
    "TypeError: unsupported operand type(s)",
    "ValueError: invalid literal for int() with base 10",
)
VOCAB_SIZE = 704


def training_texts(num_problems: int) -> Iterator[str]:
    """Each problem with and without the tool, as rendered, cut at special tokens; then the error texts."""
    problems = islice(generate_problems("sft", seed=0), num_problems)
    conversations = [
        trace for problem in problems for trace in (tool_trace(problem, str(problem.answer)), direct_trace(problem))
    ]
    rendered, _ = render_jinja_template(conversations, tools=TOOLS, chat_template=CHAT_TEMPLATE)
    special = re.compile("|".join(map(re.escape, TURN_TOKENS + TOOL_TOKENS)))
    for text in (*rendered, *ERROR_TEXTS * 8):
        yield from special.split(text)


def train_tokenizer(vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """Byte-level BPE with single-digit tokens, Qwen's special tokens and the quickstart's chat template."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[0-9\n]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*TURN_TOKENS, *TOOL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(training_texts(400), trainer)
    # The trainer marks every token it is given as special; only the file's own field can undo that.
    state = json.loads(bpe.to_str())
    for token in state["added_tokens"]:
        token["special"] = token["content"] in TURN_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def make_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    """The model's shape: 2 layers of width 128."""
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


def write_base_model(output_dir: Path, seed: int = 0) -> None:
    """Write config, safetensors, generation config and tokenizer; the same seed gives the same bytes."""
    tokenizer = train_tokenizer()
    assert len(tokenizer) == VOCAB_SIZE, f"{len(tokenizer)} tokens learned, {VOCAB_SIZE} wanted"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(make_config(tokenizer))
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a tiny random Qwen3 checkpoint with its tokenizer.")
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights")
    args = parser.parse_args()
    write_base_model(args.output_dir, args.seed)
    print(f"base model written to {args.output_dir}")


if __name__ == "__main__":
    main()
