"""Where ranks meet: a port that listens from the moment it is told."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import TCPStore, rendezvous

from slime_retool.cluster.actors import TrainerActor
from slime_retool.config import Config
from slime_retool.trainer.rendezvous import Rendezvous

LIMIT = timedelta(seconds=300)


def assert_taken(port: int) -> None:
    with pytest.raises(OSError, match="in use"):
        socket.create_server(("127.0.0.1", port)).close()


def test_ranks_that_come_early_wait_for_the_store_of_rank_0():
    meeting = Rendezvous("127.0.0.1")
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(TCPStore, meeting.host, meeting.port, 2, False, LIMIT)
        socket.create_connection((meeting.host, meeting.port), timeout=60).close()  # listens, though nobody serves yet
        assert not early.done()
        meeting.serve()
        mine, rank, size = next(rendezvous(meeting.init_method, 0, 2, timeout=LIMIT))
        mine.set("key", "of rank 0")
        assert (rank, size) == (0, 2) and early.result().get("key") == b"of rank 0"


def test_no_other_process_can_take_the_port_between_its_choice_and_its_use():
    meeting = Rendezvous("127.0.0.1")
    assert_taken(meeting.port)
    meeting.serve()
    assert_taken(meeting.port)


def test_the_store_listens_on_the_address_given_only():
    meeting = Rendezvous("127.0.0.1")
    meeting.serve()
    socket.create_connection(("127.0.0.1", meeting.port), timeout=60).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", meeting.port), timeout=60)


def test_rank_0_of_the_trainer_listens_where_it_sends_the_others():
    actor = TrainerActor.__ray_actor_class__(Config(device="cpu"), 0, roles="all", several_hosts=False)
    assert_taken(int(actor.rendezvous().removeprefix("tcp://127.0.0.1:")))
