"""Tables, curves and summary.json of reference runs, from the small files that evidence.py left.

    python tables.py --results DIR [--readme FILE]

DIR/data/MODEL holds what was measured of a model; DIR/peer.json, where it is, what a peer took for the same step.
Writes DIR/summary.json, DIR/tables.md and DIR/curves-MODEL.svg, and with --readme the lines of that file between its
two `reference` marks. The same files give the same bytes, so that a test can compare.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from program_traces import read_jsonl

from slime_retool.metrics import read_metrics
from slime_retool.rollout.statistics import Estimate, estimate

SETS = {"gsm8k": "GSM8K", "math500": "MATH-500"}
BEGIN, END = "<!-- reference: begin -->", "<!-- reference: end -->"
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf")
PHASES = ("generate", "log_probs", "train", "critic", "sync", "offload", "idle", "step")
WARM_STEPS = 2
"""Steps of a run that no median counts: kernels are compiled in them."""
MAIN, CONTROL, STREAM = "grpo", "plain", "stream"
TITLES = {STREAM: "GRPO that never waits (K = 1)"}
AIME = {"aime24": "AIME 2024", "aime25": "AIME 2025"}
Row = dict[str, Any]


@dataclass(frozen=True)
class Measured:
    """Evaluations of one state of a model on one set; each is a string of marks, one for each problem."""

    right: tuple[str, ...]
    tool: tuple[str, ...]
    cut: tuple[str, ...]

    def share(self, marks: tuple[str, ...]) -> Estimate:
        """Mean over problems of the share of ones; a problem without a usable sample is left out."""
        problems = zip(*marks, strict=True)
        told = [[int(mark) for mark in each if mark != "-"] for each in problems]
        return estimate([statistics.fmean(each) for each in told if each])

    @property
    def accuracy(self) -> Estimate:
        return self.share(self.right)

    @property
    def tool_use(self) -> float:
        return self.share(self.tool).mean

    @property
    def cut_share(self) -> float:
        return self.share(self.cut).mean


class Model:
    """What was measured of one model."""

    def __init__(self, folder: Path) -> None:
        self.name = f"qwen2.5-coder-{folder.name}"
        self.folder = folder
        self._outcomes = read_jsonl(folder / "outcomes.jsonl")
        self.runs = sorted(path.parent.name for path in folder.glob("rl_*/metrics.jsonl"))

    def longest(self, runs: Sequence[str]) -> list[str]:
        """Those that were last evaluated after the most rollouts: others, cut short, are in no mean with them."""
        most = max((self.last(run) or 0 for run in runs), default=0)
        return [run for run in runs if self.last(run) == most]

    def runs_of(self, algorithm: str) -> list[str]:
        """Runs that trained and were evaluated afterwards."""
        return [run for run in self.runs if run.startswith(f"rl_{algorithm}_") and self.last(run) is not None]

    def last(self, run: str) -> int | None:
        """The rollout after which a run was last evaluated on all sets; None: never after training."""
        found = [{row["set"] for row in self._outcomes if row["run"] == run and row["rollout"] == number}
                 for number in range(max((row["rollout"] for row in self._outcomes), default=-1) + 1)]  # fmt: skip
        return next((number for number in reversed(range(len(found))) if found[number] >= SETS.keys()), None)

    def at(self, run: str, rollout: int, name: str) -> list[Row]:
        return [row for row in self._outcomes if (row["run"], row["rollout"], row["set"]) == (run, rollout, name)]

    def measured(self, places: Sequence[tuple[str, int | None]], name: str) -> Measured | None:
        """Evaluations (run, rollout) of set `name` taken together; None where there is none."""
        rows = [row for run, rollout in places if rollout is not None for row in self.at(run, rollout, name)]
        if not rows:
            return None
        columns = ("right", "tool", "cut")
        return Measured(*(tuple(marks for row in rows for marks in samples(row, column)) for column in columns))

    def states(self) -> dict[str, list[tuple[str, int | None]]]:
        """Name of a row of the table -> the evaluations that it shows."""
        tool_runs = [run for run in self.runs if not run.startswith(f"rl_{CONTROL}_")]
        grpo = self.runs_of(MAIN)
        states: dict[str, list[tuple[str, int | None]]] = {
            "base, asked plainly": [("base_plain", -1)],
            "base, with the tool": [("base_tool", -1)],
            "SFT": [(run, -1) for run in tool_runs],
        }
        longest = self.longest(grpo)
        for run in grpo:
            last = self.last(run)
            assert last is not None
            cut = "" if run in longest else f", cut short after rollout {last + 1}"
            states[f"GRPO, seed {run.rpartition('_')[2]}{cut}"] = [(run, last)]
        if len(longest) > 1:
            states[f"GRPO, mean of {len(longest)} seeds"] = [(run, self.last(run)) for run in longest]
        for run in tool_runs:
            if run not in grpo and self.last(run) is not None:
                _, algorithm, seed = run.split("_")
                title = TITLES.get(algorithm, algorithm.upper())
                states[f"{title}, seed {seed}"] = [(run, self.last(run))]
        for run in self.runs_of(CONTROL):
            states[f"control without the tool, seed {run.rpartition('_')[2]}"] = [(run, self.last(run))]
        return states

    def summary(self) -> Row:
        """This model's entry of summary.json. The base is measured in the form in which it answers better."""
        grpo = [(run, self.last(run)) for run in self.longest(self.runs_of(MAIN))]
        states = self.states()
        entry: Row = {"seeds": len(grpo)}
        for name in SETS:
            bases = [self.measured(states[f"base, {how}"], name) for how in ("asked plainly", "with the tool")]
            stages = {"sft": self.measured(states["SFT"], name), "rl": self.measured(grpo, name)}
            known = [base.accuracy.mean for base in bases if base is not None]
            entry[name] = {"base": rounded(max(known, default=None))}
            entry[name] |= {stage: rounded(found and found.accuracy.mean) for stage, found in stages.items()}
        uses = {
            "base": self.measured(states["base, with the tool"], "math500"),
            "sft": self.measured(states["SFT"], "math500"),
            "rl": self.measured(grpo, "math500"),
        }
        entry["tool_use"] = {stage: rounded(found and found.tool_use) for stage, found in uses.items()}
        return entry


def samples(row: Row, column: str) -> list[str]:
    """Marks of an evaluation with a character for each problem: of all first samples, of all second ones, and so on."""
    each = row.get("each", 1)
    return [row[column][first::each] for first in range(each)]


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def with_interval(found: Estimate) -> str:
    return f"{100 * found.mean:.1f} % ({100 * found.low:.1f} to {100 * found.high:.1f})"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def accuracy_table(model: Model) -> str:
    rows = []
    for state, places in model.states().items():
        found = [model.measured(places, name) for name in SETS]
        if any(found):
            cells = [with_interval(one.accuracy) if one else "" for one in found]
            cells += [percent(one.tool_use) if one else "" for one in found]
            rows.append([state, *cells, " / ".join(percent(one.cut_share) if one else "" for one in found)])
    head = ["", *SETS.values(), *(f"tool use, {title}" for title in SETS.values()), "cut"]
    return markdown(head, rows)


def problems(model: Model) -> str:
    """How many problems of each set were asked."""
    counts = {name: {len(row["right"]) for row in model._outcomes if row["set"] == name} for name in SETS}
    return ", ".join(f"{title} {'/'.join(map(str, sorted(counts[name])))}" for name, title in SETS.items())


def speed_table(model: Model) -> str:
    """Medians of each run's steps after the first two; means where generation goes on across updates: there long steps
    and short ones take turns."""
    runs = {run: steps_of(model.folder / run / "metrics.jsonl") for run in ("sft", *model.runs)}
    names = [phase for phase in PHASES if any(f"perf/{phase}_seconds" in row for rows in runs.values() for row in rows)]
    head = [
        "median of a step",
        "steps",
        *(f"{name}, s" for name in names),
        "generated tokens/s",
        "trained tokens/s",
        "MFU",
    ]
    table = []
    for run, rows in runs.items():
        if not rows:
            continue
        steady = rows[WARM_STEPS:] or rows
        streams = run.startswith(f"rl_{STREAM}_")
        typical = partial(of_steps, steady, statistics.fmean if streams else statistics.median)
        cells = [number(typical(f"perf/{name}_seconds")) for name in names]
        cells += [
            number(typical("perf/generate_tokens_per_second_per_gpu"), 0),
            number(typical("perf/train_tokens_per_second_per_gpu"), 0),
        ]
        mfu = typical("perf/train_mfu")
        cells.append("" if mfu is None else percent(mfu))
        table.append([f"{run} (means)" if streams else run, str(len(rows)), *cells])
    return markdown(head, table)


def steps_of(path: Path) -> list[Row]:
    """Steps of a run that ended."""
    return [row for row in read_metrics(path) if "perf/step_seconds" in row] if path.exists() else []


def of_steps(rows: Sequence[Row], statistic: Callable[[list[float]], float], name: str) -> float | None:
    values = [row[name] for row in rows if row.get(name) is not None]
    return statistic(values) if values else None


def number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def times_table(model: Model) -> str:
    """Wall seconds of each step. Steps overlap, so that they sum to more than the whole."""
    path = model.folder / "times.jsonl"
    rows = read_jsonl(path) if path.exists() else []
    if not rows:
        return ""
    cells = [[row["step"], f"{row['end'] - row['begin']:.0f}"] for row in rows]
    whole = max(row["end"] for row in rows) - min(row["begin"] for row in rows)
    return markdown(["step", "seconds"], [*cells, ["from the first to the last, pauses included", f"{whole:.0f}"]])


def curves(model: Model) -> str:
    """Two panels as SVG: accuracy in training, and on the evaluation sets."""
    training, evaluated = {}, {}
    for run in model.runs:
        rows = steps_of(model.folder / run / "metrics.jsonl")
        points = [(row["step"] + 1, row["rollout/accuracy"]) for row in rows if "rollout/accuracy" in row]
        if points:
            training[run.removeprefix("rl_")] = smoothed(points)
    for name, title in SETS.items():
        for run in model.runs:
            numbers = sorted({row["rollout"] for row in model._outcomes if row["run"] == run and row["set"] == name})
            found = [(number + 1, model.measured([(run, number)], name)) for number in numbers]
            if len(found) > 1:
                key = f"{run.removeprefix('rl_')}, {title}"
                evaluated[key] = [(float(step), one.accuracy.mean) for step, one in found if one is not None]
    return svg([("accuracy in training, mean of 5 steps", training), ("greedy accuracy on test sets", evaluated)])


def smoothed(points: list[tuple[float, float]], width: int = 5) -> list[tuple[float, float]]:
    """Each value the mean of the last `width`."""
    values = [value for _, value in points]
    means = [statistics.fmean(values[max(0, i + 1 - width) : i + 1]) for i in range(len(values))]
    return [(step, mean) for (step, _), mean in zip(points, means, strict=True)]


def svg(panels: Sequence[tuple[str, dict[str, list[tuple[float, float]]]]]) -> str:
    """Line charts side by side; x counts rollouts, y is a share. Each panel has its legend below."""
    width, height, left, top = 460, 300, 46, 34
    deepest = max(len(lines) for _, lines in panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width * len(panels)}" height="{height + 18 * deepest + 10}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for index, (title, lines) in enumerate(panels):
        parts += panel(title, lines, index * width + left, top, width - left - 20, height - top - 36)
    return "\n".join([*parts, "</svg>", ""])


def panel(
    title: str, lines: dict[str, list[tuple[float, float]]], x: int, y: int, width: int, height: int
) -> list[str]:
    points = [point for line in lines.values() for point in line]
    most_x = max((step for step, _ in points), default=1.0) or 1.0
    low = min((int(value * 20) / 20 for _, value in points), default=0.0)
    high = max((min(1.0, int(value * 20 + 1) / 20) for _, value in points), default=1.0)
    high = max(high, low + 0.05)

    def place(step: float, value: float) -> str:
        return f"{x + width * step / most_x:.1f},{y + height * (high - value) / (high - low):.1f}"

    parts = [f'<text x="{x}" y="{y - 12}" font-weight="bold">{title}</text>']
    for tick in range(round(low * 20), round(high * 20) + 1):
        line = y + height * (high - tick / 20) / (high - low)
        parts.append(f'<path d="M{x} {line:.1f}h{width}" stroke="#ddd"/>')
        parts.append(f'<text x="{x - 6}" y="{line + 4:.1f}" text-anchor="end">{5 * tick} %</text>')
    for part in range(5):
        step = most_x * part / 4
        parts.append(f'<text x="{x + width * part / 4:.1f}" y="{y + height + 18}" text-anchor="middle">{step:g}</text>')
    for index, (name, line_points) in enumerate(lines.items()):
        colour = COLOURS[index % len(COLOURS)]
        drawn = " ".join(place(*point) for point in line_points)
        parts.append(f'<polyline points="{drawn}" fill="none" stroke="{colour}" stroke-width="2"/>')
        legend = y + height + 38 + 18 * index
        parts.append(f'<path d="M{x} {legend - 4}h24" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{x + 32}" y="{legend}">{name}</text>')
    return parts


def traces_line(model: Model) -> str:
    """Where the SFT conversations came from, as a sentence for each set."""
    path = model.folder / "selection.json"
    if not path.exists():
        return ""
    found = json.loads(path.read_text())
    total = found.pop("conversations")
    sentences = [
        f"{name}: of {one['tries']} programs for {one['questions']} questions {one['right']} were right, "
        f"{one['own_conversations']} became conversations, {one['converted_conversations']} more are worked answers "
        f"as programs; {one['for_rl']} questions went into RL."
        for name, one in found.items()
    ]
    return " ".join([f"{total} SFT conversations.", *sentences])


def aime_line(model: Model) -> str:
    """AIME by its mean over the samples of a problem, as a sentence."""
    parts = []
    for name, title in AIME.items():
        rows = model.at("aime", -1, name)
        found = model.measured([("aime", -1)], name)
        if found is not None:
            parts.append(f"{title} mean@{rows[0].get('each', 1)} {with_interval(found.accuracy)}")
    return f"The first run's model, sampled at temperature 1: {', '.join(parts)}." if parts else ""


def rate_line(model: Model) -> str:
    """How close generation comes to the engine's own speed, as a sentence."""
    path = model.folder / "engine_rate.json"
    if not path.exists():
        return ""
    found = json.loads(path.read_text())
    each = ", ".join(f"{share:.0f} % in rollout {number}" for number, share in found["shares"].items())
    return (
        f"Generation reaches {found['engine_share']:.0f} % of the tokens per second of the same engine on the same "
        f"lengths without turns, tools and rewards ({each})."
    )


def tables(model: Model) -> str:
    parts = [f"## {model.name}", f"Problems: {problems(model)}.", accuracy_table(model), traces_line(model)]
    parts += [aime_line(model), f"![curves](curves-{model.folder.name}.svg)", speed_table(model)]
    parts += [rate_line(model), times_table(model)]
    return "\n\n".join(part for part in parts if part)


def peers(results: Path) -> dict[str, Row]:
    """What benchmarks/peers measured, by peer."""
    path = results / "peer.json"
    unmeasured = {"verl": {"step_ratio": None, "why": "not measured yet"}}
    return unmeasured | (json.loads(path.read_text()) if path.exists() else {})


def peers_table(results: Path) -> str:
    """Median seconds of a step's phases, ours and each peer's; empty where none was measured."""
    table = []
    for name, entry in peers(results).items():
        if entry["step_ratio"] is None:
            continue
        ours, theirs = entry["ours_seconds"], entry["theirs_seconds"]
        for phase in ours | theirs:
            ratio = theirs[phase] / ours[phase] if ours.get(phase) and phase in theirs else None
            table.append([name, phase, number(ours.get(phase)), number(theirs.get(phase)), number(ratio)])
    return "## Peers\n\n" + markdown(["peer", "phase", "ours, s", "theirs, s", "times"], table) if table else ""


def report(results: Path) -> dict[str, str]:
    """File name -> content of everything that is made from `results`/data."""
    folders = sorted(path.parent for path in (results / "data").glob("*/outcomes.jsonl"))
    models = [Model(folder) for folder in folders]
    summary = {model.name: model.summary() for model in models} | {"peer": peers(results)}
    made = {f"curves-{model.folder.name}.svg": curves(model) for model in models}
    parts = [*map(tables, models), peers_table(results)]
    made["tables.md"] = "\n\n".join(part for part in parts if part) + "\n"
    made["summary.json"] = json.dumps(summary, indent=1) + "\n"
    return made


def readme_lines(results: Path, readme: Path) -> str:
    """The readme's text with the lines between its marks made anew."""
    text = readme.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise SystemExit(f"{readme} has no lines {BEGIN} and {END} to write between")
    folders = sorted(path.parent for path in (results / "data").glob("*/outcomes.jsonl"))
    blocks = [f"**{model.name}**\n\n{accuracy_table(model)}" for model in map(Model, reversed(folders))]
    return before + BEGIN + "\n" + "\n\n".join(blocks) + "\n" + END + after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--readme", type=Path, help="also write this file's lines between its marks")
    args = parser.parse_args()
    for name, text in report(args.results).items():
        (args.results / name).write_text(text, encoding="utf-8")
    if args.readme is not None:
        args.readme.write_text(readme_lines(args.results, args.readme), encoding="utf-8")
    print((args.results / "tables.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
