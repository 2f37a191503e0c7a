"""The turns of trainers and engines where some of them die, with stand-ins for both."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

from slime_retool.cluster.cluster import Cluster
from slime_retool.config import Config
from slime_retool.errors import TrainerDied, WeightUpdateError


class Trainers:
    """Answers of `update_weights` and `give_weights`, one after the other; what was called, in `calls`."""

    weight_version = 4

    def __init__(self, calls: list[Any], *answers: Any) -> None:
        self.calls, self.answers = calls, list(answers)

    def _answer(self, *call: Any) -> Any:
        self.calls.append(call)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def update_weights(self, engines: dict[int, str], *, asleep: bool) -> int:
        return self._answer("update", dict(engines), asleep)

    def give_weights(self, engines: dict[int, str], *, asleep: bool) -> dict[str, str] | None:
        return self._answer("give", dict(engines), asleep)

    def start(self, num_rollout: int, iteration: int | None, *, saved: bool) -> tuple[int, dict[str, Any]]:
        return self._answer("start", num_rollout, iteration, saved)

    def offload(self, *, keep_weights: bool = False) -> None:
        self.calls.append(("trainers leave", keep_weights))

    def reload(self) -> None:
        self.calls.append("trainers come")

    def kill(self) -> None:
        self.calls.append("kill")

    def connect_engines(self, urls: list[str], version: int) -> None:
        self.calls.append(("connect", urls, version))


class Engines:
    """Engine 1 has died where `dead`; the others hold the checksums `sums`."""

    def __init__(self, calls: list[Any], *, dead: bool = False, others: bool = False, **sums: str) -> None:
        self.calls, self.dead, self.others, self.sums = calls, dead, others, sums
        self.urls = {0: "http://a", 1: "http://b"}

    def current(self) -> dict[int, str]:
        return self.urls

    def drop_dead(self, *, asleep: bool) -> bool:
        self.calls.append(("drop", asleep))
        dead, self.dead = self.dead, False
        if dead:
            self.urls = {0: "http://a"}
        return dead

    def ends_stuck(self) -> AbstractContextManager[None]:
        return nullcontext()

    def others_run(self, engines: dict[int, str]) -> bool:
        return self.others

    def weight_checksums(self, numbers: Any) -> list[dict[str, str]]:
        return [dict(self.sums) for _ in numbers]

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **options: self.calls.append((name, *arguments, *options))


def cluster(trainers: list[Any], config: dict[str, Any] | None = None, **engines: Any) -> tuple[Cluster, list[Any]]:
    calls: list[Any] = []
    made = Cluster(Config(device="cpu", rollout_num_gpus=2, **config or {}))
    made.trainers, made.engines = Trainers(calls, *trainers), Engines(calls, **engines)
    return made, calls


def test_an_update_in_which_an_engine_died_is_made_again_for_the_others():
    made, calls = cluster([WeightUpdateError("cannot be reached"), 5], dead=True)
    assert made.update_weights() == 5
    both, one = {0: "http://a", 1: "http://b"}, {0: "http://a"}
    assert calls == [("update", both, False), ("drop", False), ("update", one, False)]


def test_an_update_that_fails_although_all_engines_live_ends_the_run():
    made, calls = cluster([WeightUpdateError("refused")])
    with pytest.raises(WeightUpdateError, match="refused"):
        made.update_weights()
    assert len(calls) == 2


def test_a_replacement_gets_the_weights_of_the_last_update_and_must_hold_them():
    made, calls = cluster([{"w": "1"}, {"w": "2"}, None, TrainerDied("ended")], w="1")
    assert made._give_weights({1: "http://b"})
    assert calls == [("give", {1: "http://b"}, False)]
    with pytest.raises(WeightUpdateError, match="update 4 engine 1 holds other values than the trainer in 1 of 1"):
        made._give_weights({1: "http://b"})
    assert not made._give_weights({1: "http://b"})  # trained on already
    assert not made._give_weights({1: "http://b"})  # the loop sees it too


@pytest.mark.parametrize("flags", [{"--quantization": ["fp8"]}, {"--enable-eplb": []}])
def test_engines_whose_weights_cannot_be_compared_are_not(flags: dict[str, Any]):
    made, _ = cluster([{"w": "2"}], {"sglang_server_flags": flags}, w="1")
    assert made._give_weights({1: "http://b"})


def test_a_run_that_trains_nothing_has_no_other_weights():
    made, calls = cluster([], {"debug_rollout_only": True})
    assert made._give_weights({1: "http://b"}) and calls == []


def test_trainers_that_left_their_devices_come_back_only_where_no_engine_is_on_them():
    turns = {"colocate": True, "offload_train": True, "offload_rollout": True}
    made, calls = cluster([], turns, others=True)
    assert not made._give_weights({1: "http://b"}) and calls == []
    made, calls = cluster([{"w": "1"}], turns, w="1")
    assert made._give_weights({1: "http://b"})
    assert calls == [
        ("release", "weights", "kv_cache"), "trainers come", ("trainers leave", True), ("resume_memory", "weights"),
        ("give", {1: "http://b"}, True), ("trainers leave", False), ("resume_memory", "kv_cache"), ("resume",),
    ]  # fmt: skip


def test_trainers_that_start_again_find_their_devices_free_and_no_engine_that_waits_for_the_dead():
    made, calls = cluster([(3, {"data": 1})], dead=True)
    assert made.restart_trainers(9, 2, saved=True) == (3, {"data": 1})
    assert calls == [
        ("hold",), "kill", ("drop", False), ("release", "weights", "kv_cache"), ("start", 9, 2, True),
        ("connect", ["http://a"], 3), "trainers come",
    ]  # fmt: skip


@pytest.mark.parametrize("turns", [{"offload_train": True}, {"offload_rollout": True}], ids=["trainers", "engines"])
def test_while_trainers_and_engines_take_turns_no_engine_starts(turns: dict[str, Any]):
    made, calls = cluster([], {"colocate": True} | turns)
    made.begin_training()
    assert calls == [("hold", "settle"), ("release", "weights", "kv_cache"), "trainers come"]
    calls.clear()
    made.begin_update()
    made.begin_generation()
    assert calls[0] == ("hold",) and calls[-1] == ("let_go",)


def test_engines_with_devices_of_their_own_start_while_trainers_train():
    made, calls = cluster([])
    made.begin_training()
    assert [call[0] for call in calls if isinstance(call, tuple)] == ["release"]
    made.begin_update()
    made.begin_generation()
    assert ("hold",) in calls and calls[-1] == ("let_go",)
