"""Convert a Megatron checkpoint into a Hugging Face one; the same as `slime-retool convert to-hf`.

    python tools/convert_torch_dist_to_hf.py --input-dir TD --output-dir OUT --origin-hf-dir HF
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime_retool.commands.convert import to_hf  # noqa: E402

if __name__ == "__main__":
    sys.exit(to_hf(prog=Path(__file__).name))
