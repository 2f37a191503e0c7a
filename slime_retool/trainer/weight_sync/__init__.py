"""New weights from the trainer into every running engine.

Three transports with one interface (`transport.Transport`):

- ipc: trainer and engine share their GPUs; weights stay on the GPU and the engine opens the trainer's memory.
- broadcast: the trainer and the workers of all engines form a process group of their own (NCCL; gloo on the CPU).
- disk: a safetensors folder that the engines read, for engines that can join neither.

Around each: engines are paused, caches flushed (they belong to the old weights), the weight version counted up.
A failed update raises WeightUpdateError on every rank, and leaves the engines paused: they hold a mixture of weights
and must not answer.
"""

from __future__ import annotations

from slime_retool.trainer.weight_sync.sync import WeightSync

__all__ = ["WeightSync"]
