"""Convert a Megatron torch_dist checkpoint into a Hugging Face checkpoint (safetensors).

    python tools/convert_torch_dist_to_hf.py --input-dir TD --output-dir OUT --origin-hf-dir HF

TD is a converted or a trained checkpoint of any parallel layout: its root (the latest one is taken) or one
`iter_...` directory. OUT gets the same files, keys, shapes and dtypes as HF, with the weights of TD. LoRA adapters are
merged into the weights that they were trained on, or with --peft written alone, as PEFT (and SGLang, vLLM) load them.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_bridge.flags import OneLineParser, add_flags, flag, from_namespace  # noqa: E402


@dataclass(frozen=True)
class ConvertArgs:
    """Conversion."""

    input_dir: str | None = flag(None, metavar="DIR", help="torch_dist checkpoint to read.")
    output_dir: str | None = flag(None, metavar="DIR", help="Directory to write.")
    origin_hf_dir: str | None = flag(
        None, metavar="DIR", help="Hugging Face checkpoint that gives config, tokenizer and layout of the files."
    )
    base_dir: str | None = flag(
        None,
        metavar="DIR",
        help="torch_dist checkpoint under LoRA adapters, where it is no longer the run's --ref-load.",
    )
    peft: bool = flag(False, help="Write only the LoRA adapters, in PEFT's format, for the weights in --origin-hf-dir.")
    force: bool = flag(False, help="Replace the directory when it is there already.")


def main() -> None:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser, ConvertArgs)
    args = from_namespace(ConvertArgs, parser.parse_args())
    if args.input_dir is None or args.output_dir is None or args.origin_hf_dir is None:
        parser.error("--input-dir, --output-dir and --origin-hf-dir are all needed")

    if args.peft and args.base_dir is not None:
        parser.error("--peft leaves the base's weights out: drop --base-dir")

    from megatron_bridge.convert import convert_torch_dist_to_hf
    from megatron_bridge.peft_export import export_peft

    try:
        if args.peft:
            export_peft(args.input_dir, args.output_dir, args.origin_hf_dir, force=args.force)
        else:
            convert_torch_dist_to_hf(
                args.input_dir, args.output_dir, args.origin_hf_dir, base_dir=args.base_dir, force=args.force
            )
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(f"wrote {args.output_dir}")


if __name__ == "__main__":
    main()
