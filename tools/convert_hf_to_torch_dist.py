"""Convert a Hugging Face checkpoint into a Megatron one; the same as `slime-retool convert to-megatron`.

    python tools/convert_hf_to_torch_dist.py --hf-checkpoint DIR --save OUT
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime_retool.commands.convert import to_megatron  # noqa: E402

if __name__ == "__main__":
    sys.exit(to_megatron(prog=Path(__file__).name))
