# SPDX-License-Identifier: Apache-2.0
"""By hand: one run that is killed again and again at random moments, in its start and within its steps, and goes on
each time with the same command.

    python tests/e2e/soak.py --kills 10 --steps 40 --out runs/soak

Ends with 0 when the run finished, every step is in its metrics once, and no process of it lives.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import signal
import time
from pathlib import Path

from harness import REWARD, Lab, eventually, make_data, make_model, processes, steps_logged

AGENTS = {"ray::DashboardAgent", "ray::RuntimeEnvAgent"}  # take a minute to give up on a killed node


class Kill:
    """When to kill: `seconds` after the start or, with a `step`, after that step is on record."""

    def __init__(self, step: int, seconds: float) -> None:
        self.step, self.seconds = step, seconds
        self.since: float | None = None

    def __call__(self, folder: Path) -> bool:
        if self.since is None and steps_logged(folder) >= self.step:
            self.since = time.monotonic()
        return self.since is not None and time.monotonic() > self.since + self.seconds


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
        # By turns in the start, and within a second of a step that is this kill's share of the run.
        step = kill * (options.steps - 1) // options.kills if kill % 2 else 0
        due = Kill(step, chance.uniform(0, 1) if step else chance.uniform(1, 15))
        while True:
            run = lab.run("soak", overrides=overrides, kill_when=due, timeout=1800)
            if run.code == -signal.SIGKILL or "The current node timed out during startup" not in run.log[-2000:]:
                break
            print("Ray gave itself 30 s to start and did not, on a busy machine: the same command again", flush=True)
        assert run.code == -signal.SIGKILL, f"kill {kill + 1} came too late: the run ended with {run.code}"
        steps = max(run.metrics, default=0)
        print(f"kill {kill + 1} after {run.seconds:.0f} s of this start, {steps} steps on record", flush=True)
        assert eventually(lambda folder=run.folder: set(processes(folder)) <= AGENTS, 60), processes(run.folder)
    run = lab.run("soak", overrides=overrides, timeout=3600).check()
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_bytes().splitlines()]
    updates = collections.Counter(line["step"] for line in lines if "actor/grad_norm" in line["data"])
    assert updates == dict.fromkeys(range(1, options.steps + 1), 1), updates
    assert eventually(lambda: not processes(run.folder), 90), processes(run.folder)
    print(f"{options.steps} steps, each on record once, in {(time.monotonic() - started) / 60:.1f} min")


if __name__ == "__main__":
    main()
