# SPDX-License-Identifier: Apache-2.0
"""A Ray that stands while many runs come and go, with a process that has done the imports of their launchers.

As a script it starts both, prints how to reach them as one line of JSON, and ends them when its standard input closes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from verl_ext.cpu.platform import fork_worker

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import copies  # noqa: E402
from copies import ASKS, IMPORTS  # noqa: E402  (the process with these is itself a copy of one)

#: Ray turns its tokens on by itself once any `ray.init` of this user has made one, and a launcher copied from a process
#: that had loaded Ray before has none: Ray could not ask it whether it still needs its trainer, and ended that.
NO_TOKENS = {"RAY_AUTH_MODE": "disabled"}


def every_process() -> dict[str, str]:
    """Variables that the recipe `cpu` gives to every process of a run."""
    import yaml

    from verl_ext.recipes import recipe_root

    recipe = yaml.safe_load((recipe_root() / "recipe" / "cpu.yaml").read_text(encoding="utf-8"))
    variables = {name: str(value) for name, value in recipe["verl_ext"]["env"].items()}
    return {**variables, "VERL_PLATFORM": "cpu", "VERL_EXT_STRICT": "1", "VERL_USE_EXTERNAL_MODULES": "verl_ext.plugin"}


class StandingRay:
    """The processes, and what a run needs to use them."""

    def __init__(self, variables: dict[str, str], python: str = sys.executable, imports: str = IMPORTS) -> None:
        """Start with `python`; `variables` are for every process of a run, `imports` the modules that all runs have and
        that are neither Ray's nor verl's."""
        self.process = subprocess.Popen(
            [python, str(Path(__file__).resolve()), imports],
            env={**os.environ, **variables, **NO_TOKENS},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            if line.startswith("{"):
                break
        assert line, "Ray did not start"
        self.found = json.loads(line)

    def interpreter(self, source: str = "launchers") -> list[str]:
        """`copies.interpreter` of the process with the imports, or, from `imports`, of the one that has neither Ray's
        nor verl's nor ours."""
        return copies.interpreter(self.found["raylet"], source)

    def command(self, source: str = "launchers") -> list[str]:
        """`python -m verl.trainer.main_ppo` in such a copy."""
        return [*self.interpreter(source), "exit_code", "-m", "verl.trainer.main_ppo"]

    def copied_workers(self) -> str:
        """A word of Hydra: the run's workers are copies of the process with the imports."""
        return f"++ray_kwargs.ray_init.runtime_env.py_executable='{self.found['workers']}'"

    def environment(self, variables: dict[str, str]) -> dict[str, str]:
        """`variables` for any launcher, and through Ray's job for every process of the run."""
        job = {"runtime_env": {"env_vars": {**variables, fork_worker.FROM: self.found["imports"]}}}
        return {
            **variables,
            **NO_TOKENS,
            "RAY_ADDRESS": self.found["address"],
            fork_worker.FROM: self.found["imports"],
            "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(job),
        }

    def end(self) -> None:
        self.process.communicate(timeout=300)


def main() -> None:
    import ray

    fork_worker.set_up_workers()
    # Logical figures, so many that a run need not wait for the processes of the last one to be gone.
    context = ray.init(num_gpus=8, num_cpus=100, include_dashboard=False, log_to_driver=False)
    process = ray._private.worker._global_node.all_processes["raylet"][0].process
    assert fork_worker.__file__ in " ".join(process.args), "Ray sets its workers up with a file of its own"
    raylet = process.pid
    found = {"address": context.address_info["address"], "raylet": str(raylet)}
    found["workers"] = fork_worker.py_executable()
    os.environ[fork_worker.IDLE_S] = "inf"
    for name, modules in (("imports", sys.argv[1]), ("launchers", fork_worker.IMPORTS)):
        os.environ.update({**dict(zip(ASKS, (str(raylet), name), strict=True)), fork_worker.MODULES: modules})
        with fork_worker.connect(raylet) as connection:
            found.setdefault("imports", connection.getpeername())
            os.environ[fork_worker.FROM] = found["imports"]
    print(json.dumps(found), flush=True)
    sys.stdin.read()
    ray.shutdown()


if __name__ == "__main__":
    main()
