# SPDX-License-Identifier: Apache-2.0
"""Every name of verl that a run of verl_ext uses, looked up by presence before Ray starts.

A version does not say what a tree of verl holds: a git checkout may call itself 0.10.0.dev and be older than 0.9.1. So
nothing is decided by it. `NEEDS` lists the names by the feature that uses them; `require` looks up those of a run's
features in the launcher and names what is missing. Where verl has called one thing by two names, the function here
knows both (`merge_context`). A class of ours that overrides a method of verl's is checked by `check_overrides`, since
an override of a method that is gone would be dead code, without a word.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType
from typing import Any

from verl_ext.integration.compat import registrations, wraps

TRIED = ">=0.9.1,<0.10"
"""Versions of verl that the tests run on. Others are used if they have all names, with a word."""

TRAINER, ENGINE, UPDATES, PRUNING = "the trainer", "the FSDP engine", "verl_ext.updates_per_batch", "dvp"
LOOPS, LOOP = "an agent loop of verl_ext", "the agent loop verl_ext_"
MULTI_TURN, ORCHESTRA, GATEWAY = f"{LOOP}multi_turn", f"{LOOP}orchestra", f"{LOOP}gateway"
EMBEDDED, CPU, MODELS = "rollout.name=embedded", "the CPU platform", "verl_ext.models"

TOOLS: dict[str, tuple[str, ...]] = {
    "verl.experimental.agent_loop.tool_agent_loop": (
        "AgentData(messages, image_data, video_data, audio_data, mm_processor_kwargs, metrics, request_id, "
        "tools_kwargs)",
    ),
    "verl.experimental.agent_loop.tool_parser": ("ToolParser.get_tool_parser",),
    "verl.tools.function_tool": ("FUNCTION_TOOL_REGISTRY", "FunctionTool.call", "normalize_function_tool_return(ret)"),
}
NEEDS: dict[str, dict[str, tuple[str, ...]]] = {
    TRAINER: {
        "verl": ("DataProto",),
        "verl.trainer.ppo.core_algos": (
            "ADV_ESTIMATOR_REGISTRY",
            "POLICY_LOSS_REGISTRY",
            "agg_loss(loss_mat, loss_mask, loss_agg_mode)",
            "get_adv_estimator_fn",
            "get_policy_loss_fn",
            "kl_penalty(logprob, ref_logprob, kl_penalty)",
            "register_adv_est",
            "register_policy_loss",
        ),
        "verl.trainer.ppo.metric_utils": ("compute_variance_proxy_metrics",),
        "verl.trainer.ppo.v1": ("get_trainer_cls(name)",),
        "verl.trainer.ppo.v1.replay_buffer": ("ReplayBuffer._clear_groups(partition_id, uids)",),
        "verl.trainer.ppo.v1.trainer_base": ("PPOTrainer", "TRAINER_REGISTRY", "get_trainer_cls(name)"),
        "verl.workers.config": ("PolicyLossConfig",),
        "verl.workers.utils.padding": ("response_from_nested", "response_to_nested"),
    },
    ENGINE: {
        "verl.utils.dataset.dataset_utils": ("DatasetPadMode.NO_PADDING",),
        "verl.utils.device": ("get_device_id", "get_device_name", "get_torch_device"),
        "verl.utils.metric": ("AggregationType.SUM", "Metric(value, aggregation)"),
        "verl.utils.tensordict_utils": ("assign_non_tensor", "get_non_tensor_data(data, key, default)"),
        "verl.utils.ulysses": ("get_ulysses_sequence_parallel_rank", "get_ulysses_sequence_parallel_world_size"),
        "verl.workers.engine.base": ("EngineRegistry._engines",),
        "verl.workers.engine.fsdp": (),
        "verl.workers.engine.fsdp.transformer_impl": ("FSDPEngineWithLMHead._gather_and_unpad_packed",),
        "verl.workers.engine_workers": ("ActorRolloutRefWorker.update_actor", "TrainingWorker.train_mini_batch"),
        "verl.workers.utils.padding": ("no_padding_2_padding",),
    },
    UPDATES: {
        "verl.utils.seqlen_balancing": (
            "calculate_workload",
            "log_seqlen_unbalance(seqlen_list, partitions, prefix)",
        ),
    },
    PRUNING: {
        "verl.trainer.ppo.utils": ("need_reference_policy",),
        "verl.workers.rollout.llm_server": ("LLMServerClient.generate(request_id, sampling_params)",),
    },
    MODELS: {
        "transfer_queue": ("KVBatchMeta.select_keys",),
        "verl.checkpoint_engine.base": (
            "CheckpointEngineManager.sleep_replicas",
            "CheckpointEngineManager.update_weights(global_steps)",
            "CheckpointEngineManager.wake_up_replicas",
        ),
        "verl.experimental.separation.engine_workers": ("DetachActorWorker.save_model_to_cpu(n)",),
        "verl.single_controller.base.decorator": ("Dispatch.ONE_TO_ALL", "register(dispatch_mode)"),
        "verl.single_controller.ray.base": (
            "ResourcePoolManager(resource_pool_spec, mapping, resource_pool_dict, max_colocate_count)",
            "split_resource_pool(resource_pool, split_size)",
        ),
        "verl.trainer.ppo.utils": ("need_reference_policy",),
        "verl.utils.config": ("validate_config(config, use_reference_policy, use_critic)",),
        "verl.utils.ray_utils": ("auto_await",),
        "verl.utils.tokenizer.continuous_token_wiring": ("create_continuous_token_builder(hf_model_type)",),
        "verl.workers.rollout.llm_server": ("LLMServerManager(start_rank)", "LLMServerManager.get_replicas"),
        "verl.workers.rollout.replica": (
            "RolloutReplica.init_colocated(resource_pool)",
            "RolloutReplica.init_standalone",
            "get_rollout_replica_class",
        ),
    },
    LOOPS: {
        "verl.experimental.agent_loop.agent_loop": (
            # With it the token builder is always there; before, a loop had one only if it was asked for.
            "AgentLoopBase(hf_model_type)",
            "AgentLoopMetrics(generate_sequences, tool_calls, compute_score, num_preempted)",
            "AgentLoopOutput(prompt_ids, response_ids, response_mask, response_logprobs, multi_modal_data, "
            "reward_score, num_turns, metrics, extra_fields)",
            "_agent_loop_registry",
            "register",
        ),
        "verl.utils": ("hf_tokenizer(name_or_path)",),
        "verl.utils.profiler": ("simple_timer",),
        "verl.utils.rollout_trace": ("rollout_trace_op",),
        "verl.utils.tokenizer.continuous_token": ("ContinuousTokenBuilder.build_initial_tokens(messages)",),
        "verl.workers.rollout.llm_server": ("LLMServerClient.generate(request_id, prompt_ids, sampling_params)",),
    },
    MULTI_TURN: {
        "verl.utils.tokenizer.continuous_token": (
            "ContinuousTokenBuilder.merge_context_tokens|merge_non_assistant_tokens",
            "MergeResult(token_ids)",
        ),
        **TOOLS,
    },
    ORCHESTRA: {
        **TOOLS,
        "verl.trainer.ppo.reward": ("get_custom_reward_fn",),
        "verl.utils.reward_score": ("default_compute_score",),
    },
    GATEWAY: {
        "verl.tools.schemas": ("OpenAIFunctionToolSchema",),
        "verl.utils.import_utils": ("load_extern_object(module_path, object_name)",),
    },
    EMBEDDED: {
        "verl.utils.config": ("omega_conf_to_dataclass",),
        "verl.utils.tokenizer": ("normalize_token_ids",),
        "verl.workers.config": ("HFModelConfig", "RolloutConfig"),
        "verl.workers.rollout.base": ("BaseRollout.update_weights(weights)", "_ROLLOUT_REGISTRY"),
        "verl.workers.rollout.replica": (
            "RolloutMode",
            "RolloutReplica.launch_servers",
            "RolloutReplicaRegistry.register",
            "TokenOutput(token_ids, log_probs, stop_reason, num_preempted, extra_fields)",
        ),
        "verl.workers.rollout.utils": ("ensure_async_iterator", "get_max_position_embeddings"),
    },
    CPU: {
        "verl.checkpoint_engine.base": (
            "CheckpointEngine",
            "CheckpointEngineRegistry.register",
            "merge_weight_chunks",
            "split_weight_chunks",
        ),
        "verl.plugin.platform": ("platform_manager",),
        "verl.plugin.platform.platform_base": ("PlatformBase",),
        "verl.plugin.platform.platform_manager": (
            "PlatformRegistry.get",
            "PlatformRegistry.register(platform)",
            "_current_platform",
            "get_platform",
        ),
        "verl.utils.device": ("get_device_name",),
        "verl.utils.distributed": (),
        "verl.workers.engine.base": ("EngineRegistry.register(model_type, backend, device)",),
        "verl.workers.engine.fsdp.transformer_impl": ("FSDPEngineWithLMHead", "FSDPEngineWithValueHead"),
    },
}
"""{feature: {module: names}}. ``A.b(c, d)`` is the attribute b of A, which takes c and d; ``b|e`` is one of the two."""

TARGETS: dict[str, tuple[wraps.Target, ...]] = {  # what is replaced, by feature
    TRAINER: (
        *wraps.TRAINERS,
        wraps.ADVANTAGE,
        wraps.FILE_LOGGER,
        wraps.RUN_AGENT_LOOP,
        wraps.REWARD_FUNCTION,
        wraps.LOSS_METRICS,
    ),
    ENGINE: (wraps.SUM_PI_SQUARED,),
    LOOPS: (wraps.COMPUTE_SCORE,),
    CPU: (wraps.PROCESS_GROUP, wraps.VALUE_HEAD, wraps.OFFLOAD_POLICY, wraps.KEPT_WEIGHTS),
    MODELS: (wraps.REWARD_LOOP, wraps.LLM_SERVERS, wraps.STANDALONE_SERVERS, wraps.ROLLOUT_CLASS),
}

_V1, FSDP = "verl.trainer.ppo.v1", "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead"
OVERRIDES: dict[str, tuple[tuple[str, str], ...]] = {
    TRAINER: (
        ("verl_ext.integration.trainer:VerlExtTrainer", f"{_V1}.trainer_base:PPOTrainer"),
        ("verl_ext.integration.models.lead:LeadMixin", f"{_V1}.trainer_base:PPOTrainer"),
        ("verl_ext.integration.models.side:ModelSide", f"{_V1}.trainer_base:PPOTrainer"),
        ("verl_ext.integration.models.separate:SeparateLead", f"{_V1}.trainer_separate_async:PPOTrainerSeparateAsync"),
    ),
    MODELS: (("verl_ext.integration.models.members:MemberMixin", f"{_V1}.trainer_base:PPOTrainer"),),
    ENGINE: (
        ("verl_ext.integration.engines.engine:OnePassMixin", FSDP),
        ("verl_ext.integration.engines.agent_gradients:AgentGradientsMixin", FSDP),
        ("verl_ext.integration.engines.imitation:ImitationMixin", FSDP),
        ("verl_ext.integration.engines.update_step:UpdateStepMixin", FSDP),
    ),
    PRUNING: (("verl_ext.integration.dvp:PrunedClientMixin", "verl.workers.rollout.llm_server:LLMServerClient"),),
}
"""Classes of ours that stand in front of verl's, by feature: (ours, verl's)."""


# ---- spellings -----------------------------------------------------------------------------------------------------


def first(owner: Any, *names: str) -> Any:
    """The attribute of `owner` under the first of these names that it has. Raises UnsupportedVerl: it has none of
    them."""
    for name in names:
        if hasattr(owner, name):
            return getattr(owner, name)
    raise wraps.UnsupportedVerl(f"{_name(owner)} has no {' or '.join(names)}; {installed()}")


def merge_context(builder: Any, previous: list[Any], updated: list[Any], ids: list[int], **more: Any) -> list[int]:
    """Tokens of a conversation to which messages were appended that are not the model's.

    Args:
        builder: verl's token builder of an agent loop.
        previous: chat messages that `ids` hold.
        updated: `previous` and the appended messages.
        ids: tokens so far; they stay as they are.
        **more: ``tools``, which the chat template shows.
    """
    # Renamed between August 2026 and 0.9.1 (verl pull request 7643).
    merge = first(builder, "merge_context_tokens", "merge_non_assistant_tokens")
    return list(merge(previous, updated, ids, **more).token_ids)


def loop_arguments() -> set[str]:
    """Names of what verl passes to an agent loop; anything else comes from the entry of an agent loop config."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopBase

    # verl hands `tools` and the entry's own `name` to loops that take them, beside what the base class takes.
    return {*inspect.signature(AgentLoopBase.__init__).parameters} - {"self", "args", "kwargs"} | {"tools", "name"}


# ---- requirements --------------------------------------------------------------------------------------------------


def features(config: Any) -> list[str]:
    """Which of `NEEDS` a run wants."""
    node = config.get("verl_ext") or {}
    policy = config.actor_rollout_ref
    loops = agent_loops(config)
    wanted = {
        TRAINER: True,
        ENGINE: policy.actor.strategy in ("fsdp", "fsdp2"),
        UPDATES: node.get("updates_per_batch") is not None,
        PRUNING: (config.get("dvp") or {}).get("rho") is not None,
        LOOPS: bool(loops),
        MULTI_TURN: bool(loops & {"verl_ext_multi_turn", "verl_ext_kernels"}),
        ORCHESTRA: bool(loops & {"verl_ext_orchestra", "verl_ext_gateway"}),
        GATEWAY: "verl_ext_gateway" in loops,
        EMBEDDED: policy.rollout.get("name") == "embedded",
        CPU: node.get("platform") == "cpu",
        MODELS: bool(node.get("models")),
    }
    return [feature for feature, asked in wanted.items() if asked]


def agent_loops(config: Any) -> set[str]:
    """Those of `loops_named` that are ours; all of ours where that cannot be told."""
    named = loops_named(config)
    return set(registrations.AGENT_LOOPS) if named is None else named & set(registrations.AGENT_LOOPS)


def loops_named(config: Any) -> set[str] | None:
    """A run's default agent loop, and those that its data name in ``agent_name``. None where that cannot be told: an
    agent loop config, or data that are not Parquet files on this machine."""
    agent = config.actor_rollout_ref.rollout.get("agent") or {}
    if agent.get("agent_loop_config_path"):
        return None
    found: list[set[str] | None] = [{str(agent.get("default_agent_loop"))}]
    found += map(_named_in, data_files(config))
    return None if None in found else {name for names in found for name in names or ()}


def data_files(config: Any) -> list[str]:
    """``data.train_files`` and ``val_files``, each a path or several."""
    given = (config.data.get("train_files"), config.data.get("val_files"))
    return [str(path) for files in given for path in ([files] if isinstance(files, str) else files or [])]


def _named_in(path: str) -> set[str] | None:
    """Values of the column ``agent_name`` of a Parquet file; None if it cannot be read here."""
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        if "agent_name" not in parquet.read_schema(path).names:
            return set()
        return set(parquet.read_table(path, columns=["agent_name"])["agent_name"].unique().to_pylist())
    except (OSError, pyarrow.ArrowException):
        return None


def missing(wanted: Iterable[str]) -> list[str]:
    """What these features need and this verl lacks, one phrase each. What can't be imported here is noted in a line."""
    found: list[str] = []
    torn: dict[str, None] = {}

    def look(what: str, check: Callable[..., Any], *names: str) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of engines that are not installed; the workers say it again
                return check(*names)
        except (ImportError, AttributeError, wraps.UnsupportedVerl) as error:
            found.append(f"{what}: {error}")
        except Exception as error:  # a head node without a GPU cannot import an engine; the trainer looks again
            torn[f"{type(error).__name__}: {error}"] = None

    for feature in wanted:
        for module, names in NEEDS[feature].items():
            owner = look(f"{feature} needs the module {module}", importlib.import_module, module)
            found += [f"{feature} needs {module}.{lack}" for name in names if owner and (lack := _lacking(owner, name))]
        for target in TARGETS.get(feature, ()):
            look(feature, target.resolve)
        for pair in OVERRIDES.get(feature, ()):
            look(feature, lambda *names: check_overrides(*map(pkgutil.resolve_name, names)), *pair)
    if torn:
        print(f"verl_ext: some of verl can be looked at only where it runs ({'; '.join(torn)})", flush=True)
    return list(dict.fromkeys(found))


def require(config: Any) -> None:
    """Look up all that a run needs of verl, and say so once if this verl has it but was never tried. Raises
    UnsupportedVerl: names the features and what they lack."""
    lacking = missing(features(config))
    if lacking:
        raise wraps.UnsupportedVerl(
            f"this verl lacks {len(lacking)} of the names that the run needs: {'; '.join(lacking)}. {installed()}; "
            f"install {wraps.SUPPORTED}, or leave out what needs them."
        )
    if not _tried():
        print(
            f"verl_ext: {installed()} has all that the run needs, but was not tried (tried: verl{TRIED}).", flush=True
        )


def hooked(config: Any) -> list[str]:
    """Modules on which the plugin has a hook that a run needs, of those that `require` could import."""
    known = {module for feature in features(config) for module in NEEDS[feature]}
    return [module for module in registrations.HOOKS if module in known and module in sys.modules]


def installed() -> str:
    """The installed verl in words, for messages."""
    import verl

    return f"verl {verl.__version__} at {verl.__path__[0]}"


def _tried() -> bool:
    import verl
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion

    try:
        # 0.10.0.dev is below 0.10 in the order of versions, but is not one of these.
        return SpecifierSet(TRIED).contains(verl.__version__, prereleases=True)
    except InvalidVersion:
        return False


_NEED = re.compile(r"(?P<path>[\w.]+)(?P<others>(?:\|\w+)*)(?:\((?P<parameters>[\w, ]*)\))?")


def _lacking(module: Any, need: str) -> str | None:
    """What of a name of `NEEDS` is not there, or None."""
    parts = _NEED.fullmatch(need)
    assert parts is not None, need
    *owners, last = parts["path"].split(".")
    spellings = [last, *filter(None, parts["others"].split("|"))]
    shown = " or ".join([".".join([*owners, spelling]) for spelling in spellings])
    try:
        found = first(functools.reduce(getattr, owners, module), *spellings)
    except (AttributeError, wraps.UnsupportedVerl):
        return shown
    asked = [name.strip() for name in (parts["parameters"] or "").split(",") if name.strip()]
    # One that would vanish in **kwargs is not taken.
    refused = [name for name in asked if name not in inspect.signature(found).parameters] if asked else []
    return f"{shown} with the parameter {' and '.join(refused)}" if refused else None


# ---- overrides -----------------------------------------------------------------------------------------------------


def overrides(mixin: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Methods of a mixin that call the method of the same name of the class behind it, through ``super()``."""
    for name, member in vars(mixin).items():
        function = inspect.unwrap(member) if callable(member) else None
        if inspect.isfunction(function):
            code = function.__code__
            if "__class__" in code.co_freevars and name in _names_in(code):
                yield name, function


def _names_in(code: CodeType) -> set[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(_names_in, inner))


def check_overrides(mixin: type, base: type) -> None:
    """Refuse to put `mixin` in front of `base` unless each override of it has something to override.

    `base` must have the method, it must take the parameters that the override names, and the override must take all
    those that `base` cannot do without.

    Raises:
        UnsupportedVerl: names both classes, the method and the parameter.
    """
    for name, method in overrides(mixin):
        where = f"{mixin.__name__} overrides {base.__module__}.{base.__name__}.{name}"
        original = getattr(base, name, None)
        if original is None:
            raise wraps.UnsupportedVerl(f"{where}, which is not there in {installed()}")
        ours, theirs = (_parameters(function) for function in (method, original))
        gone = [] if _open(theirs) else [p for p in ours if p not in theirs and ours[p].kind not in _VARIADIC]
        needed = [p for p in theirs if theirs[p].kind not in _VARIADIC and theirs[p].default is inspect.Parameter.empty]
        new = [] if _open(ours) else [p for p in needed if p not in ours]
        for what, parameters in (("no longer takes", gone), ("asks for", new)):
            if parameters:
                raise wraps.UnsupportedVerl(f"{where}, which {what} {', '.join(parameters)} in {installed()}")


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return {name: p for name, p in inspect.signature(function).parameters.items() if name != "self"}


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _open(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def _name(owner: Any) -> str:
    found = owner if inspect.ismodule(owner) or inspect.isclass(owner) else type(owner)
    return f"{found.__module__}.{found.__qualname__}" if inspect.isclass(found) else found.__name__
