"""Convert a Hugging Face checkpoint (safetensors) into a Megatron torch_dist checkpoint.

    source scripts/models/qwen3-4B.sh
    python tools/convert_hf_to_torch_dist.py "${MODEL_ARGS[@]}" --hf-checkpoint DIR --save OUT

Needs no GPU and no torchrun, and holds only a few tensors in memory. OUT can be loaded in any parallel layout.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_bridge.flags import OneLineParser, add_flags, flag, from_namespace  # noqa: E402
from megatron_bridge.model_config import ModelArgs  # noqa: E402


@dataclass(frozen=True)
class ConvertArgs(ModelArgs):
    """Conversion."""

    hf_checkpoint: str | None = flag(None, metavar="DIR", help="Hugging Face checkpoint to read.")
    save: str | None = flag(None, metavar="DIR", help="Directory to write.")
    force: bool = flag(False, help="Replace the directory when it is there already.")
    tensor_model_parallel_size: int = flag(
        1, help="Only sets the padding of the vocabulary: the checkpoint fits every layout."
    )
    pipeline_model_parallel_size: int = flag(1, help="Only checked against the layers.")
    decoder_first_pipeline_num_layers: int | None = flag(None, help="Layers of the first stage; only checked.")
    decoder_last_pipeline_num_layers: int | None = flag(None, help="Layers of the last stage; only checked.")


def main() -> None:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser, ConvertArgs)
    args = from_namespace(ConvertArgs, parser.parse_args())
    if args.hf_checkpoint is None or args.save is None:
        parser.error("--hf-checkpoint and --save are both needed")

    from megatron_bridge.convert import convert_hf_to_torch_dist

    try:
        out = convert_hf_to_torch_dist(
            args,
            args.hf_checkpoint,
            args.save,
            tp=args.tensor_model_parallel_size,
            pp=args.pipeline_model_parallel_size,
            first=args.decoder_first_pipeline_num_layers,
            last=args.decoder_last_pipeline_num_layers,
            force=args.force,
        )
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
