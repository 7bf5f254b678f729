# SPDX-License-Identifier: Apache-2.0
"""The one place where verl_ext replaces a name of verl.

A class or a registry entry is always preferred. Where verl offers neither, a wrap is declared here with the verl
version and the line that it was written for, and the parameters that it counts on. A wrap whose target has changed
raises `UnsupportedVerl` with the name of the target: it never works half. So does one that is needed and that verl
does not call any more, though the name is still there.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

STRICT = "VERL_EXT_STRICT"
"""Variable of the environment, 1 in every process of a run of ours (set by the launch callback)."""

SUPPORTED = "verl>=0.9.1,<0.10"


class UnsupportedVerl(RuntimeError):
    """The installed verl does not look as this package expects."""


@dataclass(frozen=True)
class Target:
    """A name of verl that is wrapped, and what is known about it.

    Attributes:
        module: dotted name of verl's module.
        name: attribute of that module, or of a class in it (``Class.method``).
        parameters: parameter names that the wrap relies on, a subset of the signature; None for a name that is not
            called by us.
        written_for: verl version, file and line, for the reader.
        reason: why no registry, config value or subclass reaches it.
    """

    module: str
    name: str
    parameters: tuple[str, ...] | None
    written_for: str
    reason: str

    def resolve(self) -> Any:
        """Return the target, checked. Raises UnsupportedVerl: the name is gone or its parameters are not the expected
        ones."""
        try:
            target = operator.attrgetter(self.name)(importlib.import_module(self.module))
        except (ImportError, AttributeError) as error:
            raise UnsupportedVerl(self._message(f"it cannot be found ({error})")) from error
        if self.parameters is not None and not getattr(target, "__verl_ext_wrap__", False):
            found = inspect.signature(target).parameters
            missing = [name for name in self.parameters if name not in found]
            if missing:
                raise UnsupportedVerl(self._message(f"it no longer takes {', '.join(missing)}; it takes {list(found)}"))
        return target

    def put(self, replacement: Any) -> None:
        """Set the name to `replacement`."""
        *owners, last = self.name.split(".")
        setattr(functools.reduce(getattr, owners, importlib.import_module(self.module)), last, replacement)

    def _message(self, problem: str) -> str:
        return (
            f"verl_ext wraps {self.module}.{self.name} (written for {self.written_for}), but {problem}. "
            f"Install a supported verl: pip install '{SUPPORTED}'."
        )


_calls: Counter[Target] = Counter()
"""How often the replacement of each target was called in this process."""


@contextmanager
def must_be_called(target: Target, when: bool = True) -> Iterator[None]:
    """A block in which verl calls the replacement of `target`, if `when` holds. Raises UnsupportedVerl: it did not, so
    what the block has computed is not what the replacement is for."""
    before = _calls[target]
    yield
    if when and _calls[target] == before:
        raise UnsupportedVerl(target._message("verl no longer calls it where it is needed"))


@contextmanager
def replaced(target: Target, make: Callable[[Any], Any]) -> Iterator[Any]:
    """Replace `target` by `make(original)` inside the block; yields the original and always puts it back."""
    original = target.resolve()
    target.put(_counted(target, make(original)))
    try:
        yield original
    finally:
        target.put(original)


def replace(target: Target, make: Callable[[Any], Any]) -> None:
    """Replace `target` by `make(original)` for the life of the process. Idempotent."""
    original = target.resolve()
    if getattr(original, "__verl_ext_wrap__", False):
        return
    wrapped = _counted(target, make(original))
    wrapped.__verl_ext_wrap__ = True
    target.put(wrapped)


def _counted(target: Target, replacement: Any) -> Any:
    """`replacement`, whose calls are counted."""
    if inspect.isclass(replacement):

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            _calls[target] += 1
            super(counted, self).__init__(*args, **kwargs)

        counted: Any = type(
            replacement.__name__, (replacement,), {"__init__": __init__, "__doc__": replacement.__doc__}
        )
        return counted

    @functools.wraps(replacement)
    def call(*args: Any, **kwargs: Any) -> Any:
        _calls[target] += 1
        return replacement(*args, **kwargs)

    return call


def _target(what: str, where: str, reason: str) -> Target:
    """A `Target` from ``module:name(parameters)``; without parentheses it is not called by us."""
    module, _, rest = what.partition(":")
    name, called, parameters = rest.rstrip(")").partition("(")
    return Target(module, name, tuple(parameters.split(", ")) if called else None, f"verl 0.9.1, {where}", reason)


GET_TRAINER = tuple(
    _target(
        f"{module}:get_trainer_cls(name)",
        "trainer/ppo/v1/trainer_base.py:2017, called by main_ppo.TaskRunnerV1.run",
        "a trainer class may be registered after ours were; this is where verl asks for the class of the run",
    )
    for module in ("verl.trainer.ppo.v1", "verl.trainer.ppo.v1.trainer_base")
)
RUN_PPO = _target(
    "verl.trainer.main_ppo:run_ppo(config, task_runner_class)",
    "trainer/main_ppo.py:35, called by the entry points in verl.experimental",
    "they inherit trainer.use_v1=true and build trainers of the older family all the same",
)
OLDER_TRAINER = _target(
    "verl.trainer.ppo.ray_trainer:RayPPOTrainer.__new__",
    "trainer/ppo/ray_trainer.py:286; verl's subclasses do not call its __init__",
    "a task runner of somebody else may build a trainer of the older family, which has none of our hooks",
)
TRAINERS = (*GET_TRAINER, RUN_PPO, OLDER_TRAINER)
ADVANTAGE = _target(
    "verl.trainer.ppo.v1.trainer_base:"
    "compute_advantage_for_multi_trajectories(data, batch_keys, adv_estimator, config)",
    "trainer/ppo/v1/trainer_base.py `_compute_advantage`, step 3",
    "a registered estimator gets four arguments; the batch and its storage keys are visible only here",
)
RUN_AGENT_LOOP = _target(
    "verl.experimental.agent_loop.agent_loop:"
    "AgentLoopWorker._run_agent_loop(self, sampling_params, trajectory, kwargs)",
    "experimental/agent_loop/agent_loop.py:661, called by AgentLoopWorkerTQ._run_prompt",
    "verl logs what a rollout raises in the worker and drops it; the trainer is not told of which or why",
)
COMPUTE_SCORE = _target(
    "verl.experimental.agent_loop.agent_loop:AgentLoopWorker._compute_score(self, outputs, kwargs)",
    "experimental/agent_loop/agent_loop.py:967, called by AgentLoopWorkerTQ._agent_loop_postprocess",
    "turns are merged between the score, which is of the last call, and the store, which one method holds together",
)
REWARD_FUNCTION = _target(
    "verl.trainer.ppo.reward:get_custom_reward_fn(config)",
    "trainer/ppo/reward.py:56, called by load_reward_manager in the reward workers",
    "a SystemExit that a reward function raises for an answer ends verl's reward worker, and with it the run",
)
FILE_LOGGER = _target(
    "verl.utils.tracking:FileLogger(project_name, experiment_name)",
    "utils/tracking.py:529",
    "the logger opens its file for writing and so deletes the metrics of the steps before a resume",
)
PROCESS_GROUP = _target(
    "verl.utils.distributed:initialize_global_process_group_ray(timeout_second, backend)",
    "utils/distributed.py:77",
    "on the CPU the default backend reads 'cpu:gloo,cpu:gloo', which torch refuses; no key reaches it",
)
VALUE_HEAD = _target(
    "verl.utils.model:load_valuehead_model(local_path, torch_dtype, model_config, trust_remote_code)",
    "utils/model.py:641",
    "the critic's attention implementation is written into the function as flash_attention_2",
)
OFFLOAD_POLICY = _target(
    "verl.workers.engine.fsdp.transformer_impl:CPUOffloadPolicy",
    "workers/engine/fsdp/transformer_impl.py `_build_fsdp_module`",
    "forward-only models ask for pinned memory, which needs an accelerator",
)
KEPT_WEIGHTS = _target(
    "verl.utils.fsdp_utils:fsdp2_sharded_save_to_cpu(model)",
    "utils/fsdp_utils.py:1146, called by DetachActorWorker.save_model_to_cpu",
    "of a tensor on the CPU `.cpu()` is no copy, so the weights kept for later mini-batches change with every update",
)
SUM_PI_SQUARED = _target(
    "verl.utils.torch_functional:calculate_sum_pi_squared_from_logits(logits)",
    "utils/torch_functional.py:690, called by the FSDP engine's prepare_model_outputs",
    "it works in the dtype of the logits; from bfloat16 the result is wrong by up to a half",
)
LOSS_METRICS = _target(
    "verl.workers.utils.losses:Metric(aggregation, value)",
    "workers/utils/losses.py:116 `ppo_loss`",
    "every metric of a policy loss is made a mean over micro-batches and ranks; a maximum has no way through",
)
REWARD_LOOP = _target(
    "verl.trainer.ppo.v1.trainer_base:RewardLoopManager(config, rm_resource_pool)",
    "trainer/ppo/v1/trainer_base.py:347 `_setup`, step 7",
    "`_setup` starts reward workers under fixed names; a further model shares those of the run",
)
LLM_SERVERS = _target(
    "verl.trainer.ppo.v1.trainer_base:LLMServerManager(config, worker_group, rollout_resource_pool, start_rank)",
    "trainer/ppo/v1/trainer_base.py:372 `_setup`, step 9",
    "servers are named by their number alone, so those of two models would collide",
)
STANDALONE_SERVERS = _target(
    "verl.trainer.ppo.v1.trainer_separate_async:LLMServerManager(config, start_rank)",
    "trainer/ppo/v1/trainer_separate_async.py:154 `_setup`",
    "the same for the servers apart from training: verl counts them on from the model's own alone",
)
ROLLOUT_CLASS = _target(
    "verl.workers.engine_workers:get_rollout_class(rollout_name, mode)",
    "workers/engine_workers.py:667 `init_model`, step 3.2",
    "the worker's end of the weight sync finds its server by the same number, which it is not given",
)
