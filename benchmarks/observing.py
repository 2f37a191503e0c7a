"""What looking at a run costs: the marks that every step makes, and the dumps of a rollout, plain and compressed.

    python benchmarks/observing.py [DUMP.jsonl ...]

The marks are what a run does for --profile-rollout in steps that are not profiled: spans of requests and of phases, one
entry for each conversation, and two or three questions for each micro-batch whether it is recorded. A dump given by
name is compressed at several levels; without one, a rollout of 256 samples is made up.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from slime_retool.metrics import Phases
from slime_retool.rollout.attempts import Attempts
from slime_retool.rollout.transcripts import dump_samples
from slime_retool.trainer.timeline import Timeline
from slime_retool.types import Sample, timed

REPEATS = 20_000
LEVELS = (1, 6, 9)


def microseconds(action: Callable[[], object]) -> float:
    """Of one call, the best of five rounds."""
    rounds = []
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(REPEATS):
            action()
        rounds.append(time.perf_counter() - begin)
    return min(rounds) / REPEATS * 1e6


def marks() -> dict[str, float]:
    """Microseconds of each kind of mark, while nothing is recorded."""
    attempts, timeline, sample = Attempts(), Timeline(torch.device("cpu")), Sample(prompt="")

    def request() -> None:
        with timed("request", []) as span:
            pass
        span |= {"status": "ok", "tokens": 1, "prompt_tokens": 1, "cached_tokens": 1}
        sample.spans = [{**span, "turn": 1}]

    def phase() -> None:
        with Phases()("train"):
            pass

    def micro_batch() -> None:
        timeline.backward(tokens=1)
        with timeline.work("forward", tokens=1):
            pass
        with timeline.work("loss", tokens=1):
            pass

    def rank_phase() -> None:
        with timeline.span("train"):
            pass

    return {
        "request": microseconds(request),
        "conversation": microseconds(lambda: attempts.end(attempts.begin(sample))),
        "phase of the driver": microseconds(phase),
        "phase of a rank": microseconds(rank_phase),
        "micro-batch": microseconds(micro_batch),
    }


def made_up_dump(folder: Path) -> Path:
    """256 samples of two turns, with token texts as a run writes them."""
    rng = random.Random(1)
    words = [f" w{rng.randrange(10**6)}" for _ in range(5000)]

    def row(index: int) -> tuple[Sample, dict[str, object]]:
        texts = rng.choices(words, weights=[1 / (place + 1) for place in range(len(words))], k=600)
        mask = [1] * 250 + [0] * 50 + [1] * 200
        sample = Sample(
            prompt="".join(texts[:100]), index=index, tokens=[hash(text) % 150_000 for text in texts],
            response_length=500, response="".join(texts[100:]), loss_mask=mask,
            rollout_log_probs=[each * -rng.random() ** 4 for each in mask], weight_versions=[3, 3],
            token_versions=[3 * each for each in mask],
        )  # fmt: skip
        return sample, {"rollout_id": 0, "token_texts": texts}

    path = folder / "rollout_000000.jsonl"
    dump_samples(path, map(row, range(256)))
    return path


def sizes(path: Path) -> list[str]:
    data = path.read_bytes()
    begin = time.perf_counter()
    for line in data.splitlines():
        json.loads(line)
    parsing = time.perf_counter() - begin
    lines = [f"{path.name}: {len(data) / 2**20:.1f} MiB, {parsing:.2f} s to parse"]
    for level in LEVELS:
        begin = time.perf_counter()
        small = gzip.compress(data, level)
        written = time.perf_counter()
        gzip.decompress(small)
        read = time.perf_counter()
        share = len(small) / len(data)
        times = f"{written - begin:.2f} s more to write, {read - written:.2f} s to read"
        lines.append(f"  level {level}: {share:.1%} of it, {times}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dumps", nargs="*", type=Path)
    args = parser.parse_args()
    for name, cost in marks().items():
        print(f"{name:20} {cost:6.2f} us")
    with tempfile.TemporaryDirectory() as folder:
        for path in args.dumps or [made_up_dump(Path(folder))]:
            print("\n".join(sizes(path)))


if __name__ == "__main__":
    main()
