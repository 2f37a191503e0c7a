"""`slime-retool convert`: checkpoints between Hugging Face (safetensors) and Megatron (torch_dist).

`to-megatron` and `to-hf` are the same as `tools/convert_hf_to_torch_dist.py` and `tools/convert_torch_dist_to_hf.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from megatron_bridge.flags import OneLineParser, add_flags, flag, from_namespace, option_name
from megatron_bridge.hf_config import described_by_hf, model_args_from_hf, read_hf_config
from megatron_bridge.model_config import ModelArgs
from slime_retool.chat import load_tokenizer
from slime_retool.config.groups import folder
from slime_retool.config.printable import option_lines
from slime_retool.errors import ConfigError, run_command
from slime_retool.tool_use.control_tokens import made_of, untrained_control_tokens
from slime_retool.tool_use.format import FORMATS

T = TypeVar("T")

TO_MEGATRON = """Convert a Hugging Face checkpoint (safetensors) into a Megatron torch_dist checkpoint.

    %(prog)s --hf-checkpoint DIR --save OUT

Needs no GPU and no torchrun, and holds only a few tensors in memory. OUT can be loaded in any parallel layout.
The model is described by DIR's config.json; flags of scripts/models/*.sh that are given are compared with it.
"""
TO_HF = """Convert a Megatron torch_dist checkpoint into a Hugging Face checkpoint (safetensors).

    %(prog)s --input-dir TD --output-dir OUT --origin-hf-dir HF

TD is a converted or a trained checkpoint of any parallel layout: its root (the latest one is taken) or one
`iter_...` directory. OUT gets the same files, keys, shapes and dtypes as HF, with the weights of TD. LoRA adapters are
merged into the weights that they were trained on, or with --peft written alone, as PEFT (and SGLang, vLLM) load them.
"""
FLAGS = """Print the Megatron flags of a Hugging Face checkpoint, as a shell array like those of scripts/models/*.sh.

    %(prog)s DIR > model.sh

DIR is read for its config.json alone.
"""
INIT_TOKENS = """Copy a Hugging Face checkpoint, with rows of their own for tokens that it was never trained on.

    %(prog)s DIR --output-dir OUT [--tokens '<tool_call>' '</tool_call>']

A token's row, in the embedding and in the output layer, becomes the mean of the rows of the tokens that its text would
be made of without it. By default: those tokens of the chat template and of the formats of --tool-format whose rows
are zero or the same as another token's.
"""


@dataclass(frozen=True)
class ToMegatronArgs(ModelArgs):
    """Conversion."""

    hf_checkpoint: str | None = folder("Hugging Face checkpoint to read.")
    save: str | None = folder("Directory to write.")
    force: bool = flag(False, help="Replace the directory when it holds a checkpoint already.")
    tensor_model_parallel_size: int = flag(
        1, help="Only sets the padding of the vocabulary: the checkpoint fits every layout."
    )
    pipeline_model_parallel_size: int = flag(1, help="Only checked against the layers.")
    decoder_first_pipeline_num_layers: int | None = flag(None, help="Layers of the first stage; only checked.")
    decoder_last_pipeline_num_layers: int | None = flag(None, help="Layers of the last stage; only checked.")


@dataclass(frozen=True)
class ToHfArgs:
    """Conversion."""

    input_dir: str | None = folder("torch_dist checkpoint to read.")
    output_dir: str | None = folder("Directory to write.")
    origin_hf_dir: str | None = folder("Hugging Face checkpoint that gives config, tokenizer and layout of the files.")
    base_dir: str | None = folder("torch_dist checkpoint under LoRA adapters, where it is no longer --ref-load.")
    peft: bool = flag(False, help="Write only the LoRA adapters, in PEFT's format, for the weights in --origin-hf-dir.")
    force: bool = flag(False, help="Replace the directory when it holds a checkpoint already.")


@dataclass(frozen=True)
class InitTokensArgs:
    """Tokens."""

    output_dir: str | None = folder("Directory to write.")
    tokens: list[str] = flag([], nargs="+", help="Tokens to give rows; those that were never trained when not given.")
    force: bool = flag(False, help="Replace the directory when it holds a checkpoint already.")


def to_megatron(argv: Sequence[str] | None = None, prog: str = "slime-retool convert to-megatron") -> int:
    """Hugging Face to torch_dist. Returns the exit code."""
    return _run(ToMegatronArgs, _to_megatron, argv, prog, TO_MEGATRON)


def _to_megatron(args: ToMegatronArgs) -> int:
    hf_checkpoint, save = _needed(args, "hf_checkpoint", "save")

    from megatron_bridge.convert import convert_hf_to_torch_dist

    written = convert_hf_to_torch_dist(
        described_by_hf(args, read_hf_config(hf_checkpoint)),
        hf_checkpoint,
        save,
        tp=args.tensor_model_parallel_size,
        pp=args.pipeline_model_parallel_size,
        first=args.decoder_first_pipeline_num_layers,
        last=args.decoder_last_pipeline_num_layers,
        force=args.force,
    )
    print(f"wrote {written}")
    return 0


def to_hf(argv: Sequence[str] | None = None, prog: str = "slime-retool convert to-hf") -> int:
    """torch_dist to Hugging Face, or its adapters to PEFT. Returns the exit code."""
    return _run(ToHfArgs, _to_hf, argv, prog, TO_HF)


def _to_hf(args: ToHfArgs) -> int:
    input_dir, output_dir, origin_hf_dir = _needed(args, "input_dir", "output_dir", "origin_hf_dir")
    if args.peft and args.base_dir is not None:
        raise ConfigError("--peft leaves the base's weights out: drop --base-dir")

    from megatron_bridge.convert import convert_torch_dist_to_hf
    from megatron_bridge.peft_export import export_peft

    if args.peft:
        export_peft(input_dir, output_dir, origin_hf_dir, force=args.force)
    else:
        convert_torch_dist_to_hf(input_dir, output_dir, origin_hf_dir, base_dir=args.base_dir, force=args.force)
    print(f"wrote {output_dir}")
    return 0


def model_flags(argv: Sequence[str] | None = None) -> int:
    """The flags of a Hugging Face checkpoint on stdout. Returns the exit code."""
    prog = "slime-retool convert flags"
    parser = _parser(prog, FLAGS)
    parser.add_argument("directory", metavar="DIR", help="Hugging Face checkpoint.")
    directory = parser.parse_args(argv).directory

    def show() -> int:
        lines = option_lines(model_args_from_hf(read_hf_config(directory)))
        print("\n".join(["MODEL_ARGS=(", *(f"    {line}" for line in lines), ")"]))
        return 0

    return run_command(prog, show, mistakes=(ValueError, OSError))


def init_tokens(argv: Sequence[str] | None = None) -> int:
    """Rows for tokens that were never trained. Returns the exit code."""
    prog = "slime-retool convert init-tokens"
    parser = _parser(prog, INIT_TOKENS)
    parser.add_argument("directory", metavar="DIR", help="Hugging Face checkpoint to read.")
    add_flags(parser, InitTokensArgs)
    parsed = parser.parse_args(argv)
    args = from_namespace(InitTokensArgs, parsed)
    return run_command(prog, lambda: _init_tokens(parsed.directory, args), mistakes=(ValueError, OSError))


def _init_tokens(directory: str, args: InitTokensArgs) -> int:
    (output_dir,) = _needed(args, "output_dir")

    from megatron_bridge.token_rows import initialize_tokens

    tokenizer = load_tokenizer(directory, "DIR")
    vocabulary = tokenizer.get_vocab()
    tokens = args.tokens or untrained_control_tokens(directory, tokenizer, *FORMATS)
    if not tokens:
        raise ConfigError(f"{directory}: every token of the chat template was trained; name others with --tokens")
    for token in tokens:
        if token not in vocabulary:
            raise ConfigError(f"--tokens {token}: the tokenizer in {directory} has no such token")
    pieces = {vocabulary[token]: made_of(tokenizer, token) for token in tokens}
    initialize_tokens(directory, output_dir, pieces, force=args.force)
    print(f"wrote {output_dir} with new rows for {' '.join(tokens)}")
    return 0


def _needed(args: object, *names: str) -> list[str]:
    """The folders that these fields name. ConfigError with the flags that were not given."""
    missing = [f"{option_name(name)} DIR" for name in names if args.__dict__[name] is None]
    if missing:
        raise ConfigError(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} required")
    return [args.__dict__[name] for name in names]


def _parser(prog: str, description: str) -> OneLineParser:
    return OneLineParser(prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def _run(cls: type[T], convert: Callable[[T], int], argv: Sequence[str] | None, prog: str, description: str) -> int:
    parser = _parser(prog, description)
    add_flags(parser, cls)
    args = from_namespace(cls, parser.parse_args(argv))
    return run_command(prog, lambda: convert(args), mistakes=(ValueError, OSError))
