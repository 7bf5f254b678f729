# SPDX-License-Identifier: Apache-2.0
"""By hand: one run that is killed again and again at random times, and goes on each time with the same command.

    python tests/e2e/soak.py --kills 10 --steps 40 --out runs/soak

Ends with 0 when the run finished, every step is in its metrics once, and no process of it lives.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import time
from pathlib import Path

from harness import REWARD, Lab, eventually, make_data, make_model, processes, steps_logged

AGENTS = {"ray::DashboardAgent", "ray::RuntimeEnvAgent"}  # take a minute to give up on a killed node


class Kill:
    """When to kill: `seconds` after `steps` further lines of metrics."""

    def __init__(self, steps: int, seconds: float) -> None:
        self.steps, self.seconds = steps, seconds
        self.first: int | None = None
        self.due: float | None = None

    def __call__(self, folder: Path) -> bool:
        logged = steps_logged(folder)
        self.first = logged if self.first is None else self.first
        if self.due is None and logged >= self.first + self.steps:
            self.due = time.monotonic() + self.seconds
        return self.due is not None and time.monotonic() > self.due


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True)
    root = options.out.resolve()
    (root / "reward.py").write_text(REWARD)
    lab = Lab(make_model(root / "model"), make_data(root), root / "reward.py", root)
    chance = random.Random(options.seed)
    overrides = [
        f"trainer.total_training_steps={options.steps}",
        "data.train_batch_size=4",
        "trainer.total_epochs=1000",
        "trainer.save_freq=1",
        "trainer.max_actor_ckpt_to_keep=2",
    ]
    started = time.monotonic()
    for kill in range(options.kills):
        # Some steps after the start and some seconds after that, in the start itself where no step is to come first.
        due = Kill(chance.randint(0, 2 * options.steps // (options.kills + 1)), chance.uniform(1, 20))
        run = lab.run("soak", overrides=overrides, kill_when=due, timeout=1800)
        if run.code == 0:
            print(f"kill {kill + 1}: came too late, the run had finished", flush=True)
            break
        steps = max(run.metrics, default=0)
        print(f"kill {kill + 1} after {run.seconds:.0f} s of this start, {steps} steps on record", flush=True)
        assert eventually(lambda folder=run.folder: set(processes(folder)) <= AGENTS, 60), processes(run.folder)
    run = lab.run("soak", overrides=overrides, timeout=3600).check()
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    updates = collections.Counter(line["step"] for line in lines if "actor/grad_norm" in line["data"])
    assert updates == dict.fromkeys(range(1, options.steps + 1), 1), updates
    assert eventually(lambda: not processes(run.folder), 90), processes(run.folder)
    print(f"{options.steps} steps, each on record once, in {(time.monotonic() - started) / 60:.1f} min")


if __name__ == "__main__":
    main()
