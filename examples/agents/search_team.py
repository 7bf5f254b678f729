# SPDX-License-Identifier: Apache-2.0
"""What a run of a search team learnt: searching, reading and the answer, told apart.

    python examples/agents/search_team.py RUN [RUN ...] [--out DIR]

prints a table and, with --out, writes search_team.json and search_team.png. Numbers are of trajectories, before and
after training from the validation's dump, in between from the transcripts.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from verl_ext.lab.transcripts.read import Choice, read

AGENTS = ("verifier", "searcher", "answerer")
CURVES = {
    "exact_match": "exact match",
    "retrieved": "answer retrieved",
    "exact_match_given_retrieved": "exact match, answer retrieved",
    "searched_first": "first step is a search",
    "valid_verifier": "valid: verifier",
    "valid_searcher": "valid: searcher",
    "valid_answerer": "valid: answerer",
}


def summary(infos: list[dict[str, Any]]) -> dict[str, float | None]:
    """Shares over trajectories, of their ``reward_extra_info`` and ``score``; None where there is nothing to share."""

    def share(part: float, whole: float) -> float | None:
        return round(part / whole, 3) if whole else None

    def total(name: str) -> float:
        return float(sum(info.get(name) or 0.0 for info in infos))

    retrieved = [info for info in infos if info.get("answer_retrieved")]
    readable = [info for info in retrieved if info.get("answered")]
    numbers: dict[str, float | None] = {
        "trajectories": float(len(infos)),
        "exact_match": share(total("score"), len(infos)),
        "retrieved": share(len(retrieved), len(infos)),
        "exact_match_given_retrieved": share(sum(info["score"] for info in retrieved), len(retrieved)),
        "exact_match_given_retrieved_and_readable": share(sum(info["score"] for info in readable), len(readable)),
        "retrieved_given_searched": share(len(retrieved), sum(bool(info.get("searches")) for info in infos)),
        "searched_first": share(total("searched_first"), len(infos)),
    }
    for agent in AGENTS:
        calls = total(f"calls_{agent}")
        numbers[f"valid_{agent}"] = share(calls - total(f"invalid_{agent}"), calls)
    return numbers


def validation(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Trajectories of a dump by kind of answer, numbers or names (populations or countries).

    A dump has a line an output, each with its trajectory's numbers.
    """
    sessions: dict[str, dict[str, Any]] = {}
    for line in path.read_bytes().splitlines():
        row = json.loads(line)
        # The reward function's own "score" is not there where no answer could be read; verl's "reward" is.
        sessions[row["uid"].rpartition("_")[0]] = {**row, "score": row["reward"]}
    kinds: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in sessions.values():
        kinds["numbers" if str(row["gts"][0]).isdigit() else "names"].append(row)
    return kinds


def collect(run: Path) -> dict[str, Any]:
    """Summaries of a run: ``validation`` by step and kind, ``training`` by step."""
    numbers: dict[str, Any] = {"validation": {}, "training": {}}
    for path in sorted((run / "validation").glob("*.jsonl"), key=lambda path: int(path.stem)):
        numbers["validation"][path.stem] = {kind: summary(one) for kind, one in sorted(validation(path).items())}
    if (run / "rollouts").is_dir():
        steps: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for record in read(run, Choice()):
            steps[record["step"]].append({**record["info"], "score": record["score"]})
        numbers["training"] = {str(step): summary(infos) for step, infos in sorted(steps.items())}
    return numbers


def plot(runs: dict[str, Any], target: Path) -> None:
    """Each number over the training steps: a thin line a run, a thick one for their mean."""
    import matplotlib
    import numpy as np

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.6), sharey=True)
    for axis, names in zip(axes, (list(CURVES)[:4], list(CURVES)[4:]), strict=True):
        for color, name in enumerate(names):
            lines = []
            for numbers in runs.values():
                steps = [int(step) for step in numbers["training"]]
                lines.append([np.nan if one[name] is None else one[name] for one in numbers["training"].values()])
                axis.plot(steps, lines[-1], color=f"C{color}", alpha=0.3, linewidth=0.8)
            shortest = min(map(len, lines))
            mean = np.nanmean([line[:shortest] for line in lines], axis=0)
            axis.plot(steps[:shortest], mean, color=f"C{color}", label=CURVES[name])
        axis.set(xlabel="step", ylim=(-0.02, 1.02))
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    axes[0].set_ylabel("share")
    axes[0].set_title("trajectories", fontsize=10)
    axes[1].set_title("calls that could be read", fontsize=10)
    figure.tight_layout()
    figure.savefig(target, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    runs = {run.name: collect(run) for run in given.runs}
    if len(runs) < len(given.runs):
        parser.error("two of the runs have the same name; a run's folder is its name")
    for run in given.runs:
        if not any(runs[run.name].values()):
            parser.error(f"{run}: neither validation/*.jsonl nor rollouts/ is there")
    for name, numbers in runs.items():
        lines = {
            f"{name}, validation {step}, {kind}": one
            for step, kinds in numbers["validation"].items()
            for kind, one in kinds.items()
        }
        lines |= {f"{name}, training {step}": one for step, one in numbers["training"].items()}
        for title, one in lines.items():
            print(title + ": " + ", ".join(f"{key} {value}" for key, value in one.items()))
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "search_team.json").write_text(json.dumps(runs, indent=2) + "\n")
        plot(runs, given.out / "search_team.png")


if __name__ == "__main__":
    main()
