"""All that a trainer imports on the way to its first step, at once: it takes seconds, beside the start of engines.

The order is that of a trainer: the CPU compatibility layer comes before anything of Megatron.
"""

from __future__ import annotations

from megatron_bridge.cpu_compat import install_cpu_compat

install_cpu_compat()

import megatron.core.dist_checkpointing  # noqa: E402, F401
import megatron.core.dist_checkpointing.strategies.torch  # noqa: E402, F401
import megatron.core.distributed  # noqa: E402, F401
import megatron.core.models.gpt.gpt_layer_specs  # noqa: E402, F401
import megatron.core.models.gpt.gpt_model  # noqa: E402, F401
import megatron.core.optimizer  # noqa: E402, F401
import megatron.core.optimizer_param_scheduler  # noqa: E402, F401
import megatron.core.pipeline_parallel  # noqa: E402, F401

import slime_retool.trainer.core  # noqa: E402
import slime_retool.trainer.weight_sync  # noqa: E402, F401
