"""RL of the tiny model while its processes are killed or stopped at random; then compares with runs left in peace.

    python benchmarks/chaos_soak.py [--steps 300] [--every 5] [--undisturbed 3] [--folder DIR] [--out FILE] [FLAG ...]

Begins with the quickstart's SFT model, which it makes in DIR where there is none. After a random number of steps,
--every on average, and a random moment into the next one, one of these gets a signal: an engine (killed or stopped),
the router, a trainer rank, the sandbox's broker. Further FLAGs go to every run (`--max-staleness 1`).

All learning rates fall to 0 over the run. At the quickstart's constant one, which is meant for 24 steps, a policy that
is nearly certain of its answers falls below 88 % now and then and recovers (in 11 of the last 240 steps of a run with
faults, in 11 to 13 without), so that one evaluation at the end says nothing.

Fails unless the run ends with 0, its held-out accuracy is within the band of the undisturbed runs (their lowest and
highest, with two standard errors of one evaluation around), the driver's memory is flat, no sample is trained on
twice, and no process is left.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "quickstart")]

from prepare import convert_command  # noqa: E402
from run import FULL, RECIPE, Quickstart  # noqa: E402

from benchmarks.children import child  # noqa: E402
from slime_retool.metrics import read_metrics  # noqa: E402

MARK = "SLIME_RETOOL_SOAK"
MEMORY_GROWTH = 1.1
"""Of the driver, from the second fifth of the steps to the last."""


def is_engine(command: list[str]) -> bool:
    return command[1:3] == ["-m", "slime_retool.engine.cpu_main"]


def is_router(command: list[str]) -> bool:
    return len(command) > 1 and command[1].endswith("router_main.py")


def is_trainer(command: list[str]) -> bool:
    return command[0].startswith("ray::TrainerActor")


def is_broker(command: list[str]) -> bool:
    return "broker.broker" in command


FAULTS: dict[str, tuple[Callable[[list[str]], bool], signal.Signals]] = {
    "engine killed": (is_engine, signal.SIGKILL),
    "engine stopped": (is_engine, signal.SIGSTOP),
    "router killed": (is_router, signal.SIGKILL),
    "trainer killed": (is_trainer, signal.SIGKILL),
    "broker killed": (is_broker, signal.SIGKILL),
}


@dataclass
class Report:
    """What one run came to."""

    steps: int = 0
    exit_code: int | None = None
    accuracy: float = math.nan
    seconds: float = 0.0
    faults: dict[str, int] = field(default_factory=dict)
    moved: float = 0.0
    """Requests that were asked again of another engine or router."""
    failed: dict[str, float] = field(default_factory=dict)
    """Samples left out, by what failed."""
    driver_gib: list[float] = field(default_factory=list)
    """Mean over the second fifth of the steps, and over the last."""
    left_over: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class Soak(Quickstart):
    """The quickstart's RL stage, longer, with two engines and two trainer ranks."""

    def prepare(self) -> None:
        """Inputs, and the SFT model where there is none yet."""
        if not (self.out / "sft_hf").is_dir():
            self._clean()
            self._write_inputs(self._rl_rows())
            self._stage("convert", convert_command(self.out))
            self._stage("sft", self._sft())

    def command(self, name: str, steps: int, flags: list[str]) -> list[str]:
        """One RL run into the folder `name`."""
        folder = self.out / name
        return [
            *self._rl(), "--output-dir", str(folder), "--save", str(folder / "checkpoints"),
            "--num-rollout", str(steps), "--eval-interval", str(steps), "--save-interval", "2", "--save-keep", "2",
            "--rollout-num-gpus", "2", "--actor-num-gpus-per-node", "2", "--engine-hang-timeout", "20",
            "--sglang-startup-timeout", "180", "--max-engine-restarts", "100000", "--max-restarts", "100000",
            "--lr-decay-style", "linear", "--skip-eval-before-train", "--no-progress", *flags,
        ]  # fmt: skip


def step_of(metrics: Path) -> int:
    """Steps that are complete."""
    return sum("perf/step_seconds" in row for row in read_metrics(metrics)) if metrics.exists() else 0


def run(soak: Soak, name: str, steps: int, flags: list[str], every: float | None, rng: random.Random) -> Report:
    """One run, with faults every so many steps if any."""
    report, folder, mark = Report(), soak.out / name, uuid.uuid4().hex
    environment = {
        **os.environ, MARK: mark, "PYTHONPATH": f"{RECIPE}:{ROOT}", "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    begin = time.monotonic()
    seen: dict[int, psutil.Process] = {}
    counts: collections.Counter[str] = collections.Counter()
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier soak, whose steps would count as this one's
    folder.mkdir(parents=True)
    with (
        open(folder / "output.log", "w") as log,
        child(
            soak.command(name, steps, flags), env=environment, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
        ) as process,
    ):
        driver, at = psutil.Process(process.pid), 1 + rng.expovariate(1 / every) if every else math.inf
        while process.poll() is None:
            time.sleep(0.2)
            try:
                children = driver.children(recursive=True)
            except psutil.NoSuchProcess:
                break
            seen |= {one.pid: one for one in children}
            done = step_of(folder / "metrics.jsonl")
            if done >= at and done < steps - 1:
                time.sleep(rng.uniform(0, 2))
                kind = rng.choice(list(FAULTS))
                if strike(kind, children, rng):
                    counts[kind] += 1
                    at = done + max(1.0, rng.expovariate(1 / every)) if every else math.inf
        report.exit_code = process.wait()
    report.seconds, report.faults = round(time.monotonic() - begin, 1), dict(counts)
    deadline = time.monotonic() + 60
    while (left := [one for one in seen.values() if alive(one)]) and time.monotonic() < deadline:
        time.sleep(0.5)
    report.left_over = [" ".join(command_of(one))[:200] for one in left]
    judge(report, folder, steps)
    return report


def command_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def strike(kind: str, processes: list[psutil.Process], rng: random.Random) -> bool:
    """Send the signal to one process that fits, and to all below it; whether there was one."""
    fits, number = FAULTS[kind]
    found = [process for process in processes if (command := command_of(process)) and fits(command)]
    if not found:
        return False
    chosen = rng.choice(found)
    try:
        for process in [chosen, *chosen.children(recursive=True)]:
            process.send_signal(number)
    except psutil.Error:
        return False
    print(f"{time.strftime('%H:%M:%S')} {kind}: process {chosen.pid}", flush=True)
    return True


def judge(report: Report, folder: Path, steps: int) -> None:
    """Fill in what the run's files say, and what is wrong with it."""
    rows = read_metrics(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
    # The times of a step are lost where a trainer dies between its save and the step's end.
    trained = [row for row in rows if "train/loss" in row]
    report.steps = len(trained)
    report.moved = sum(row.get("rollout/engine_moved", 0) for row in trained)
    for row in trained:
        for name, value in row.items():
            if name.startswith("rollout/failed_"):
                report.failed[name] = report.failed.get(name, 0) + value
    fifth = max(1, len(trained) // 5)
    memory = [row["memory/driver_host_gib"] for row in trained if "memory/driver_host_gib" in row]
    if memory:
        report.driver_gib = [round(fmean(part), 3) for part in (memory[fifth : 2 * fifth] or memory, memory[-fifth:])]
    evaluations = [row["eval/held_out/accuracy"] for row in rows if "eval/held_out/accuracy" in row]
    if evaluations:
        report.accuracy = evaluations[-1]
    if report.exit_code != 0:
        report.problems.append(f"exit code {report.exit_code}, see {folder / 'output.log'}")
    if report.steps != steps:
        report.problems.append(f"{report.steps} of {steps} steps")
    if report.left_over:
        report.problems.append(f"{len(report.left_over)} processes are left")
    if report.driver_gib and report.driver_gib[1] > MEMORY_GROWTH * report.driver_gib[0]:
        report.problems.append(f"the driver grew from {report.driver_gib[0]} to {report.driver_gib[1]} GiB")
    report.problems += repeated(folder, steps)


def repeated(folder: Path, steps: int) -> list[str]:
    """What is wrong with the numbers of the samples that were trained on."""
    numbers: collections.Counter[int] = collections.Counter()
    for path in sorted((folder / "rollouts").glob("rollout_*.jsonl")):
        with path.open() as file:
            numbers.update(json.loads(line)["index"] for line in file)
    twice = [number for number, count in numbers.items() if count > 1]
    return [f"samples {twice[:5]} were trained on more than once"] if twice else []


def outside_band(accuracy: float, others: list[float], evaluated: int) -> str | None:
    """The complaint about an accuracy that is further off than chance explains."""
    margin = 2 * math.sqrt(max(fmean(others) * (1 - fmean(others)), 1e-3) / evaluated)
    low, high = min(others) - margin, max(others) + margin
    if low <= accuracy <= high:
        return None
    return f"accuracy {accuracy:.3f} is outside of {low:.3f} to {high:.3f}, the band of undisturbed runs"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0], allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=300, help="RL steps (default: %(default)s)")
    parser.add_argument("--every", type=float, default=5.0, help="mean steps between faults (default: %(default)s)")
    parser.add_argument("--undisturbed", type=int, default=3, help="runs to compare with (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of model, data and faults (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=Path("outputs/chaos"), help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="also write the report here, as JSON")
    args, flags = parser.parse_known_args()
    soak = Soak(args.folder.resolve(), args.seed, FULL)
    soak.prepare()
    report = run(soak, "chaos", args.steps, flags, args.every, random.Random(args.seed))
    others = []
    for number in range(args.undisturbed):
        seeded = [*flags, "--seed", str(args.seed + number), "--rollout-seed", str(args.seed + number)]
        others.append(run(soak, f"undisturbed_{number}", args.steps, seeded, None, random.Random(0)))
    complaint = outside_band(report.accuracy, [other.accuracy for other in others], FULL.eval_rows) if others else None
    if complaint is not None:
        report.problems.append(complaint)
    answer = {"flags": flags, "chaos": asdict(report), "undisturbed": [asdict(other) for other in others]}
    text = json.dumps(answer, indent=1)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")
    return 1 if report.problems or any(other.problems for other in others) else 0


if __name__ == "__main__":
    sys.exit(main())
