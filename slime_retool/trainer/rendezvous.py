"""Where the processes of a group meet: an address that listens before anybody is told of it."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore


class Rendezvous:
    """A port of `host` that listens, made in the process that is to be rank 0 and kept until the group exists.

    init_method: what every rank, rank 0 too, gives to torch.distributed. Ranks that come before `serve` wait.
    """

    def __init__(self, host: str) -> None:
        """Listens on this address only, where a store that torch binds listens on all that the host has."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=1024)
        self.host, self.port = host, int(self._listener.getsockname()[1])
        self.init_method = f"tcp://{f'[{host}]' if ':' in host else host}:{self.port}"
        self._store: TCPStore | None = None

    def serve(self) -> None:
        """Put the group's store behind the port. `multi_tenant` lets rank 0's group find it instead of binding one."""
        from torch.distributed import TCPStore

        self._store = TCPStore(
            self.host, self.port, is_master=True, wait_for_workers=False, multi_tenant=True,
            master_listen_fd=self._listener.detach(),
        )  # fmt: skip
