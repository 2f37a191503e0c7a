"""Equal work for two trainers: the same prompts, with the same number of tokens to generate for each.

    python benchmarks/peers/equal_work.py --questions FILE --output-dir DIR --steps N --prompts P

FILE has a column `question` (examples/reference/questions.py writes such files). Writes DIR/ours.jsonl and
DIR/verl.parquet. A prompt's number of tokens is drawn log-uniformly between the bounds, and all samples of the prompt
have it: with the end of text ignored, lengths do not depend on what a model says.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path


def limits(count: int, shortest: int, longest: int, seed: int = 0) -> list[int]:
    """`count` numbers of tokens, log-uniform in [shortest, longest]."""
    rng = random.Random(seed)
    low, high = math.log(shortest), math.log(longest)
    return [round(math.exp(rng.uniform(low, high))) for _ in range(count)]


def main() -> None:
    import pandas

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=64, help="of a step")
    parser.add_argument("--shortest", type=int, default=64)
    parser.add_argument("--longest", type=int, default=512)
    args = parser.parse_args()
    count = args.steps * args.prompts
    lines = args.questions.read_text(encoding="utf-8").splitlines()[:count]
    questions = [json.loads(line)["question"] for line in lines]
    if len(questions) < count:
        raise SystemExit(f"{args.questions} has {len(questions)} questions, {count} are needed; lower --steps")
    numbers = limits(count, args.shortest, args.longest)
    prompts = [[{"role": "user", "content": question}] for question in questions]
    args.output_dir.mkdir(parents=True, exist_ok=True)
    ours = (
        json.dumps({"prompt": prompt, "label": "0", "metadata": {"limit": number}})
        for prompt, number in zip(prompts, numbers, strict=True)
    )
    (args.output_dir / "ours.jsonl").write_text("".join(f"{line}\n" for line in ours), encoding="utf-8")
    theirs = [
        {
            "data_source": "equal_work",
            "prompt": prompt,
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "0"},
            "extra_info": {"index": index, "limit": number},
        }
        for index, (prompt, number) in enumerate(zip(prompts, numbers, strict=True))
    ]
    pandas.DataFrame(theirs).to_parquet(args.output_dir / "verl.parquet", index=False)


if __name__ == "__main__":
    main()
