"""The turns of trainers and engines where some of them die, with stand-ins for both."""

from __future__ import annotations

import socket
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from test_engine_upkeep import Parts, kept, quick  # noqa: F401 (a fixture)

from slime_retool.cluster import trainers as trainers_module
from slime_retool.cluster.cluster import Cluster
from slime_retool.cluster.engines import Engines as RealEngines
from slime_retool.cluster.trainers import Trainers as RealTrainers
from slime_retool.config import Config
from slime_retool.engine.admin import EngineAdmin
from slime_retool.errors import SaveError, TrainerDied, WeightUpdateError
from slime_retool.types import RolloutBatch


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

    def drop_dead(self, *, asleep: bool, stuck: bool = True) -> bool:
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


def listens(url: str) -> bool:
    address = urlsplit(url)
    try:
        socket.create_connection((address.hostname, address.port), 10).close()
    except OSError:
        return False
    return True


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Paths and bodies of what engines are asked; those that do not listen cannot be."""
    asked: list[tuple[str, dict[str, Any]]] = []

    def request(self: EngineAdmin, path: str, body: dict[str, Any]) -> str:
        if not listens(self.url):
            raise WeightUpdateError(f"{self.url}{path} cannot be reached")
        asked.append((path, body))
        return "{}"

    monkeypatch.setattr(EngineAdmin, "_request", request)
    return asked


TURNS = {"rollout_num_gpus": 2, "colocate": True, "offload_train": True, "offload_rollout": True}


@pytest.mark.usefixtures("quick", "requests")
def test_an_engine_that_dies_while_trainers_have_the_devices_is_left_out_of_the_update():
    parts = Parts(2)
    with kept(parts) as upkeep:
        made = Cluster(Config(device="cpu", **TURNS))
        trainers = Trainers([], 5)
        made.trainers, made.engines = trainers, RealEngines(made._config)
        made.engines._upkeep = upkeep
        made.begin_training()
        parts.engines[1].dead = "was ended by SIGKILL"
        parts.engines[1].close()
        made.begin_update()
        assert made.update_weights() == 5 and trainers.calls[-1] == ("update", {0: parts.engines[0].url}, True)
        made.begin_generation()
        assert (upkeep.faults, upkeep.restarts) == (1, 1)


@pytest.mark.usefixtures("quick")
def test_an_engine_that_is_started_in_an_update_gives_back_nothing_where_nothing_is_away(requests):
    """Without tags SGLang gives back all that it has."""
    config = Config(device="cpu", **{**TURNS, "rollout_num_gpus": 1}, max_staleness=1, offload_rollout_cache=False)
    parts = Parts(1)
    with kept(parts) as upkeep:
        engines = RealEngines(config)
        engines._upkeep = upkeep
        engines.hold(settle=True)
        engines.release("weights", "kv_cache")
        engines.resume_memory("weights")
        requests.clear()
        parts.engines[0].dead = "was ended by SIGKILL"
        parts.engines[0].close()
        assert engines.drop_dead(asleep=True)
        assert "/pause_generation" in [path for path, _ in requests]
        assert "/release_memory_occupation" not in [path for path, _ in requests]


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
    with pytest.raises(TrainerDied):  # told where nobody serves, see test_engine_upkeep.py
        made._give_weights({1: "http://b"})


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


class Writing:
    """A rank that answers looks at its save with `outcomes`, one after the other, and with None from then on."""

    def __init__(self, *outcomes: float | Exception | None) -> None:
        self.outcomes = list(outcomes)

    def trainer(self, method: str, wait: bool) -> float | None:
        assert (method, wait) == ("finish_save", False), "this rank would wait for one that may have failed"
        outcome = self.outcomes.pop(0) if self.outcomes else None
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


@pytest.fixture
def saving(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Trainers whose policy and critic have ranks of their own, which write a save in the background."""

    def call(ranks: list[Any], method: str, *arguments: Any, **options: Any) -> list[Any]:
        return [rank.trainer(*arguments) for rank in ranks] if method == "trainer" else []

    monkeypatch.setattr(trainers_module, "call", call)
    monkeypatch.setattr(trainers_module, "results", lambda answers, died: answers)
    monkeypatch.setattr(trainers_module, "death_of", lambda ranks: None)
    monkeypatch.setattr(trainers_module, "time", SimpleNamespace(sleep=lambda seconds: None))

    def made(policy: list[Writing], critic: list[Writing]) -> RealTrainers:
        trainers = RealTrainers(Config(device="cpu"), [], several_hosts=False)
        trainers._groups = [policy, critic]
        trainers.save(3, {}, background=True)
        return trainers

    return made


@pytest.mark.parametrize("wait", [False, True])
def test_a_critic_that_cannot_save_is_heard_of_while_the_policy_waits_for_its_checkpoint(saving: Any, wait: bool):
    trainers = saving([Writing(), Writing()], [Writing(None), Writing(SaveError("no room"))])
    with pytest.raises(SaveError, match="no room"):
        trainers.finish_save(wait=wait)
    trainers.settle_save()  # asks no rank: what goes on there never ends


def test_a_save_has_ended_when_every_rank_of_every_model_has_written_it(saving: Any):
    trainers = saving([Writing(None, None, 2.5), Writing(1.0)], [Writing(None, 4.0)])
    assert [trainers.finish_save(wait=False) for _ in range(3)] == [None, None, 4.0]
    waited = saving([Writing(None, None, 2.5)], [Writing(None, 1.5), Writing(None, None, None, 2.0)])
    assert waited.finish_save(wait=True) == 2.5


def test_the_seconds_of_a_separate_critics_values_add_to_those_of_the_policys_passes(saving: Any, monkeypatch):
    """The policy waits for the values."""
    answers = {
        "optimize": {"train/loss": 1.0, "perf/log_probs_seconds": 2.0},
        "train_critic": {"critic/loss": 3.0, "perf/log_probs_seconds": 0.5},
    }
    monkeypatch.setattr(trainers_module, "ray", SimpleNamespace(put=lambda value: value))
    rank = SimpleNamespace(trainer=lambda method, *arguments: answers.get(method))
    metrics = saving([rank], [rank]).train(RolloutBatch([]), 0)
    assert metrics == {"train/loss": 1.0, "critic/loss": 3.0, "perf/log_probs_seconds": 2.5}
