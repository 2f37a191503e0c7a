"""One weight update: pause, flush, send, count, resume, with every rank knowing how each step went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist

from megatron_bridge.lora import adapters_off
from slime_retool.config.groups import TRANSPORTS
from slime_retool.engine.admin import EngineAdmin, every_engine
from slime_retool.engine.checksum import tensor_checksum
from slime_retool.engine.server import engine_workers
from slime_retool.errors import WeightUpdateError
from slime_retool.protocols import load_function
from slime_retool.trainer.core import Trainer
from slime_retool.trainer.gather import EXPERTS, hf_named_tensors
from slime_retool.trainer.weight_sync.adapters import AdapterTransport, peft_tensors
from slime_retool.trainer.weight_sync.transport import Peers, Transport, together


class WeightSync:
    """Sends the trainer's weights to engines. One object per training process; everything is collective."""

    def __init__(
        self,
        trainer: Trainer,
        engine_urls: Sequence[str],
        *,
        host: str = "127.0.0.1",
        transport: str | None = None,
        version: int = 0,
    ) -> None:
        """
        Args:
            host: address of global rank 0 as the engines reach it.
            transport: a name of `TRANSPORTS`, or the path of one; default --update-weight-transport.
            version: what to count updates from.
        """
        config = trainer.config
        self.weight_version = version
        """What the engines hold now."""
        self._trainer = trainer
        parallel = {True: config.expert_tensor_parallel_size, False: trainer.actor.tp_size}
        sizes = {name: parameter.nbytes for name, parameter in trainer.module.named_parameters()}
        largest = max(size * parallel[EXPERTS in name] for name, size in sizes.items())
        bounds = torch.tensor([largest, sum(sizes.values())], dtype=torch.int64, device=trainer.device)
        dist.all_reduce(bounds, dist.ReduceOp.MAX)
        largest, share = bounds.tolist()
        wanted = min(config.update_weight_buffer_size, share * dist.get_world_size())
        self._peers = Peers(
            trainer=trainer,
            engines=[],
            workers=engine_workers(config),
            host=host,
            bucket_bytes=max(wanted, largest),
            timeout=config.distributed_timeout_minutes * 60,
        )
        transport = transport or config.weight_transport
        make = load_function(TRANSPORTS.get(transport, transport), "--update-weight-transport")
        self._transport: Transport = make(self._peers)
        if config.serves_adapters:
            self._transport = AdapterTransport(self._peers, self._transport, colocated=transport == "ipc")
        self._urls: dict[int, str] | None = None
        self._begun = False
        """Whether an update was sent. Before the first, engines may hold what another run, or trainers before these,
        had read under the same version numbers."""
        self.set_engines(engine_urls)

    def set_engines(self, engine_urls: Sequence[str] | Mapping[int, str]) -> None:
        """Take another set of engines (after a restart), by number where some are missing.

        Connections are made anew at the next update; for the same engines nothing changes.
        """
        numbered = dict(engine_urls) if isinstance(engine_urls, Mapping) else dict(enumerate(engine_urls))
        if numbered == self._urls:
            return
        self._urls = numbered
        self._peers.engines = [EngineAdmin(url, timeout=self._peers.timeout) for url in numbered.values()]
        self._peers.numbers = list(numbered)
        self._transport.reset()

    def update(self, *, asleep: bool = False) -> int:
        """Send all weights to all engines; returns the new weight version. Collective.

        With `asleep` the engines are paused already, and stay so: what they had read is gone, or kept on purpose.
        Raises WeightUpdateError on every rank when any engine refused or a step took too long.
        """
        self._send(self.weight_version + 1, asleep)
        self.weight_version += 1
        return self.weight_version

    def repeat(self, *, asleep: bool = False) -> None:
        """`update` for engines that missed the last one: the weights must be the same, and so is the version."""
        self._send(self.weight_version, asleep)

    def _send(self, version: int, asleep: bool) -> None:
        engines = self._peers.engines

        def pause() -> None:
            if not engines:
                raise WeightUpdateError("there is no engine to send weights to")
            if not asleep:
                every_engine(engines, lambda engine: engine.pause())
            keeps = self._trainer.config.keeps_cache
            if not self._begun if keeps else not asleep:
                # Nothing runs until `resume`, so nothing of the old weights can be cached after this.
                every_engine(engines, lambda engine: engine.flush_cache())

        def finish() -> None:
            if self._trainer.config.moe_router_enable_expert_bias:
                every_engine(engines, lambda engine: engine.refresh_copies())
            every_engine(engines, lambda engine: engine.set_weight_version(version))
            if not asleep:
                every_engine(engines, lambda engine: engine.resume())

        leads = self._trainer.rank == 0
        for step, here in ((pause, leads), (self._transport.send, True), (finish, leads)):
            try:
                together(step if here else lambda: None)
            except WeightUpdateError as error:
                self._transport.reset()
                raise WeightUpdateError(f"weight update {version} failed: {error}") from None
        self._begun = True

    def weight_checksums(self) -> dict[str, str]:
        """{HF name: checksum} of the trainer's weights on global rank 0, {} elsewhere. Collective.

        Of an engine's that serves adapters: the frozen weights, and the adapters under PEFT's names.

        Comparable with `EngineAdmin.weight_checksums` when the engine holds the trainer's dtype.
        """
        trainer = self._trainer
        apart = trainer.config.serves_adapters
        with adapters_off(trainer.module) if apart else nullcontext():
            tensors = hf_named_tensors(trainer.module, trainer.config)
            sums = {name: tensor_checksum(tensor) for name, tensor in tensors}
        adapters = peft_tensors(trainer) if apart else {}
        return sums | {name: tensor_checksum(tensor) for name, tensor in adapters.items() if trainer.rank == 0}

    def close(self) -> None:
        """Give up connections to the engines. Errors are ignored: engines may be gone already."""
        self._transport.close()
