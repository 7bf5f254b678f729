# SPDX-License-Identifier: Apache-2.0
"""Options of the kernel room, at ``verl_ext.kernels`` of a run; the judge outside of a run has the defaults."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, Literal

import numpy as np
import ray

from verl_ext.integration.settings.options import OptionError, dataclass_of, read, select
from verl_ext.methods.kernel_reward import kernel_reward
from verl_ext.rollout.kernels import compiler, coverage
from verl_ext.rollout.kernels.languages import BACKENDS, check_backend, missing, module
from verl_ext.rollout.kernels.players.cuda import Cuda
from verl_ext.sandbox import check

KEY = "verl_ext.kernels"
Rule = Literal["paper", "released_best", "last"]
FAST = (1.0, 1.2, 1.5, 2.0)
"""Speedups p of Fast@p."""


@dataclasses.dataclass(frozen=True)
class JudgeOptions:
    """How a candidate is judged.

    Attributes:
        language: what the model writes: ``fuse``, ``c``, ``python``, ``triton``, or a module's name (see `languages`).
        backend: what kernels are made for: ``c`` (gcc, this machine's processor), or for the language ``triton``
            ``triton_interpret``, which says what is right and pays no speed, or ``triton``: a GPU with CUDA.
        tolerance: largest error of an output, relative to its own size plus the root mean square of all of them.
        batch: different inputs in a batch.
        pairs: batches of candidate and reference that are timed, at least.
        max_pairs: at most; more are taken while the interval is wider than `precision` on either side.
        precision: of the speedup's 95 % interval.
        second_look: a larger speedup is measured again in a fresh process, and the smaller one counts.
        looks: at the candidate's instruction pointer, for the coverage.
        compile_s: seconds of processor time for the compiler; on the clock `PATIENCE` times as many.
        run_s: seconds of processor time for the candidate in all, four times as many for what is interpreted; on the
            clock `PATIENCE` times as many, on a GPU `DEVICE_PATIENCE` times.
        memory_mb: MiB that it may allocate.
    """

    language: str = "fuse"
    backend: str = "c"
    tolerance: float = 1e-4
    batch: int = 8
    pairs: int = 7
    max_pairs: int = 15
    precision: float = 0.075
    second_look: float = 3.0
    looks: int = 100
    compile_s: int = 10
    run_s: float = 10.0
    memory_mb: int = 1024

    def __post_init__(self) -> None:
        module(self.language)
        if self.backend not in BACKENDS:
            raise ValueError(f"backend is {self.backend!r}; this version has {', '.join(BACKENDS)}")
        for name, least in (("batch", 1), ("pairs", 3), ("looks", 10), ("compile_s", 1), ("memory_mb", 64)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if self.max_pairs < self.pairs:
            raise ValueError(f"max_pairs is {self.max_pairs}; it must be at least pairs, which is {self.pairs}")
        for name in ("tolerance", "precision", "second_look", "run_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be greater than 0")


@dataclasses.dataclass(frozen=True)
class Stts:
    """``verl_ext.kernels.stts``: sequential test-time scaling, how validation plays a task.

    Attributes:
        iterations: 0: it plays as training does. Else the first plays `turns` turns, and each of the others one more,
            whose prompt is the task and the kept turns.
        turns: of the first iteration.
        window: turns that are kept.
        select: which, see `verl_ext.methods.kernel_reward.stts_select`.
    """

    iterations: int = 0
    turns: int = 5
    window: int = 4
    select: Rule = "paper"

    def __post_init__(self) -> None:
        for name, least in (("iterations", 0), ("turns", 1), ("window", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")

    @property
    def max_turns(self) -> int:
        """Of all iterations together."""
        return self.turns + self.iterations - 1


@dataclasses.dataclass(frozen=True)
class KernelOptions(JudgeOptions):
    """``verl_ext.kernels``: the judge's options, and those of the loop and its evaluation pool.

    Attributes:
        max_turns: answers to one task.
        stop_at: a speedup that ends a trajectory; null: all turns are played.
        speedup_rule: the ``ratio``, or ``low``, the lower end of its interval: above the truth in 3 % of judgements.
        workers: processes that judge, on this run's nodes together. 0: the node's processors less one, at least one;
            for ``triton`` one, and each has a GPU of Ray's to itself.
        max_pending: evaluations that wait or run; more wait in their agent loops.
        cache: remember verdicts, so that one program is judged once.
        cache_dir: where they are kept for other runs on machines of this kind too; null: in this run alone.
        pay_decoys: pay for decoys like for other right kernels, which only shows what the check is for.
        reward: options of `verl_ext.methods.kernel_reward.kernel_reward`.
        stts: options of `Stts`.
        agent_id: the turn field ``agent_id``.
        read_thinking: code inside ``<think>...</think>`` counts too; otherwise only what comes after it.
    """

    max_turns: int = 3
    stop_at: float | None = None
    speedup_rule: Literal["ratio", "low"] = "ratio"
    workers: int = 0
    max_pending: int = 1024
    cache: bool = True
    cache_dir: str | None = None
    pay_decoys: bool = False
    reward: dict[str, Any] = dataclasses.field(default_factory=dict)
    stts: dict[str, Any] = dataclasses.field(default_factory=dict)
    agent_id: str = "solver"
    read_thinking: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_backend(self.backend, self.language)
        for name, least in (("max_turns", 1), ("workers", 0), ("max_pending", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")


def check_kernels(config: Any) -> None:
    """Refuse a run whose kernels could not be judged on this machine.

    Raises:
        OptionError: a bad option, or no compiler, or no tracing, or too few GPUs, with the remedy.
        CageError: this machine has not what the sandbox's cage needs.
    """
    options = read_options(config)
    check(str(select(select(select(config, "verl_ext"), "sandbox"), "cage", "required")))
    if not compiler.version():
        raise OptionError(f"{KEY}: there is no gcc with binutils here. Install both (Debian: apt install gcc).")
    if refused := coverage.works():
        raise OptionError(f"{KEY}: coverage cannot be measured here: {refused}.")
    if options.backend == "triton" and (lacks := Cuda().lacks()):
        raise OptionError(f"{KEY}.backend=triton: {lacks}: {KEY}.backend=triton_interpret")
    if options.backend == "triton" and ray.is_initialized():
        trainer = config["trainer"]["nnodes"] * config["trainer"]["n_gpus_per_node"]
        there, workers = int(ray.cluster_resources().get("GPU", 0)), options.workers or 1
        if there < trainer + workers:
            said = f"{workers} judges of the back end triton hold a GPU each, beside {trainer} of the trainer"
            raise OptionError(f"{KEY}.workers: {said}: the Ray cluster has {there} in all. Add some, or use fewer.")
    if lacks := missing(options.language):
        raise OptionError(f"{KEY}.language: {lacks}")


def read_options(config: Any) -> KernelOptions:
    """The options of a composed configuration of verl; ``reward`` and ``stts`` with all their values.

    Raises:
        OptionError: unknown key or bad value.
    """
    node = select(config, "verl_ext")
    found = read(node, "kernels", KernelOptions, where=KEY)
    rewards: Any = read(select(node, "kernels"), "reward", dataclass_of(kernel_reward), where=f"{KEY}.reward")
    reward = {key: value for key, value in dataclasses.asdict(rewards).items() if value is not inspect.Parameter.empty}
    none = np.zeros(0)
    try:
        kernel_reward(none, none, none, penalised=none, **reward)
    except ValueError as error:
        raise OptionError(f"{KEY}.reward: {error}") from error
    stts = read(select(node, "kernels"), "stts", Stts, where=f"{KEY}.stts")
    return dataclasses.replace(found, reward=reward, stts=dataclasses.asdict(stts))
