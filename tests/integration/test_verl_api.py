# SPDX-License-Identifier: Apache-2.0
"""What of verl a run needs, looked up by presence; what was replaced, and whether it was called."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import verl
import verl.trainer.ppo.v1 as v1
from hydra import compose
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopBase
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY, PPOTrainer
from verl.utils.tokenizer.continuous_token import ContinuousTokenBuilder, MergeResult
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.rollout.llm_server import LLMServerClient

import verl_ext
from verl_ext import plugin
from verl_ext.cpu.platform.engine import CpuFsdpMixin
from verl_ext.integration import dvp
from verl_ext.integration.compat import registrations, verl_api, wraps
from verl_ext.integration.engines import agent_gradients, engine, update_step
from verl_ext.integration.models.separate import SeparateLead
from verl_ext.integration.parts.base import Part
from verl_ext.integration.parts.outputs.metrics_file import MetricsFile
from verl_ext.integration.trainer import VerlExtTrainer

PACKAGE = Path(verl_ext.__file__).parent
MERGE = verl_api.first(ContinuousTokenBuilder, "merge_context_tokens", "merge_non_assistant_tokens").__name__


@pytest.fixture
def config(verl_configuration: None) -> Callable[..., Any]:
    """Composes a run of the multi-turn loop on the embedded engine, with the overrides that it is given."""
    return lambda *overrides: compose(
        "ppo_trainer",
        overrides=[
            "+recipe=trloo",
            "data.train_files=[]",
            "data.val_files=[]",
            "actor_rollout_ref.rollout.n=4",
            "actor_rollout_ref.rollout.name=embedded",
            "actor_rollout_ref.rollout.agent.default_agent_loop=verl_ext_multi_turn",
            *overrides,
        ],
    )


# ---- names ---------------------------------------------------------------------------------------------------------


def test_this_verl_has_every_name() -> None:
    assert verl_api.missing(verl_api.NEEDS) == []


def imported_names() -> Iterator[tuple[str, str, str]]:
    """(file, module of verl, name) of each import in the parts of verl_ext that take part in a run.

    Without those of `vllm_cpu_*` and `sglang_cpu_*`, whose modules of verl import the engine: they are looked up in the
    process that has it.
    """
    for room in ("integration", "rollout", "cpu"):
        for path in sorted((PACKAGE / room).rglob("*.py")):
            if not path.name.startswith(("vllm_cpu_", "sglang_cpu_")):
                for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "verl":
                        yield from ((path.name, str(node.module), alias.name) for alias in node.names)


@pytest.mark.seconds
def test_every_name_that_is_imported_is_on_the_list() -> None:
    listed = {
        (module, name.split("(")[0].split(".")[0])
        for needs in verl_api.NEEDS.values()
        for module, names in needs.items()
        for name in names
    }
    modules = {module for needs in verl_api.NEEDS.values() for module in needs}
    lacking = [
        f"{file}: {module}.{name}"
        for file, module, name in imported_names()
        if (module, name) not in listed and f"{module}.{name}" not in modules
    ]
    assert lacking == [], "add them to verl_api.NEEDS"


def test_every_wrap_is_on_the_list() -> None:
    listed = {target for targets in verl_api.TARGETS.values() for target in targets}
    assert {value for value in vars(wraps).values() if isinstance(value, wraps.Target)} <= listed


@pytest.mark.parametrize(
    ("owner", "name", "message"),
    [
        (
            ContinuousTokenBuilder,
            MERGE,
            "verl_ext_multi_turn needs .*merge_context_tokens or .*merge_non",
        ),
        (
            "verl.workers.utils.padding",
            "response_from_nested",
            "the trainer needs verl.workers.utils.padding.response_from",
        ),
        ("verl.trainer.ppo.v1.trainer_base", "compute_advantage_for_multi_trajectories", "it cannot be found"),
        (
            PPOTrainer,
            "_compute_ref_log_prob",
            r"VerlExtTrainer overrides .*PPOTrainer\._compute_ref_log_prob, which is not",
        ),
        (
            FSDPEngineWithLMHead,
            "prepare_model_outputs",
            r"OnePassMixin overrides .*FSDPEngineWithLMHead\.prepare_model_outputs, which is not",
        ),
    ],
)
def test_what_is_missing_is_named_before_ray_starts(
    config: Any, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, message: str
) -> None:
    monkeypatch.delattr(importlib.import_module(owner) if isinstance(owner, str) else owner, name)
    with pytest.raises(wraps.UnsupportedVerl, match=message) as caught:
        verl_api.require(config())
    assert f"verl {verl.__version__} at " in str(caught.value) and "\n" not in str(caught.value)


def test_a_name_that_takes_other_parameters_is_missing(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl.utils.seqlen_balancing.log_seqlen_unbalance", lambda lengths, partitions: {})
    with pytest.raises(wraps.UnsupportedVerl, match="log_seqlen_unbalance with the parameter seqlen_list and prefix"):
        verl_api.require(config("verl_ext.updates_per_batch=2"))
    verl_api.require(config())  # nobody asks for it here


@pytest.mark.seconds
def test_only_what_the_run_wants_is_looked_up(config: Any, tmp_path: Path) -> None:
    loop = "actor_rollout_ref.rollout.agent.default_agent_loop"
    assert verl_api.features(config()) == [
        verl_api.TRAINER,
        verl_api.ENGINE,
        verl_api.LOOPS,
        verl_api.MULTI_TURN,
        verl_api.EMBEDDED,
    ]
    plain = config(f"{loop}=single_turn_agent", "actor_rollout_ref.rollout.name=vllm")
    assert verl_api.features(plain) == [verl_api.TRAINER, verl_api.ENGINE]
    more = config("+recipe=[dvp,cpu]", f"{loop}=verl_ext_orchestra", "verl_ext.updates_per_batch=2")
    assert {verl_api.PRUNING, verl_api.CPU, verl_api.ORCHESTRA, verl_api.UPDATES} <= set(verl_api.features(more))


@pytest.mark.seconds
def test_the_data_may_name_the_agent_loop(config: Any, tmp_path: Path) -> None:
    import pandas

    path = tmp_path / "rows.parquet"
    pandas.DataFrame({"agent_name": ["single_turn_agent", "verl_ext_step_wise"]}).to_parquet(path)
    plain = "actor_rollout_ref.rollout.agent.default_agent_loop=single_turn_agent"
    assert verl_api.agent_loops(config(plain, f"data.train_files={path}")) == {"verl_ext_step_wise"}
    assert verl_api.agent_loops(config(plain, f"data.val_files=[{path}]")) == {"verl_ext_step_wise"}
    # What cannot be read here may name any of them.
    assert verl_api.agent_loops(config(plain, "data.train_files=hdfs://far/away.parquet")) == set(
        registrations.AGENT_LOOPS
    )


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("0.9.1", False),
        ("0.9.4.post1", False),
        ("0.10.0.dev", True),
        ("0.10.0rc1", True),
        ("0.9.0", True),
        ("main", True),
    ],
)
def test_a_version_is_only_said(
    config: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], version: str, said: bool
) -> None:
    """0.10.0.dev is a checkout that may be older than 0.9.1 and, for PEP 440, is less than 0.10."""
    monkeypatch.setattr(verl, "__version__", version)
    verl_api.require(config())
    line = (
        f"verl_ext: verl {version} at {verl.__path__[0]} has all that the run needs, but was not tried (tried: verl>="
    )
    assert capsys.readouterr().out.startswith(line) is said


# ---- spellings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", ["merge_context_tokens", "merge_non_assistant_tokens"])
def test_both_spellings_of_the_merge_are_called(spelling: str) -> None:
    given: list[Any] = []

    def merge(self: Any, previous: list[Any], updated: list[Any], ids: list[int]) -> MergeResult:
        given.extend((previous, updated))
        return MergeResult(
            token_ids=[*ids, 7], inserted_token_ids=[], appended_token_count=1, removed_prefix_token_count=0
        )

    builder = type("Builder", (), {spelling: merge})()
    assert verl_api.merge_context(builder, ["a"], ["a", "b"], [1, 2]) == [1, 2, 7]
    assert given == [["a"], ["a", "b"]]
    with pytest.raises(wraps.UnsupportedVerl, match="has no merge_context_tokens or merge_non_assistant_tokens"):
        verl_api.merge_context(object(), [], [], [])


def test_what_verl_passes_to_a_loop_is_read_from_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {
        "trainer_config",
        "server_manager",
        "tokenizer",
        "hf_model_type",
        "tools",
        "name",
    } <= verl_api.loop_arguments()
    assert not {"self", "kwargs", "orchestra"} & verl_api.loop_arguments()

    def more(self: Any, trainer_config: Any, something_new: Any, **kwargs: Any) -> None: ...

    monkeypatch.setattr(AgentLoopBase, "__init__", more)
    assert "something_new" in verl_api.loop_arguments()


# ---- overrides -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mixin", "base", "some"),
    [
        (VerlExtTrainer, PPOTrainer, {"fit", "_compute_advantage", "_update_actor", "_compute_ref_log_prob"}),
        (SeparateLead, v1.PPOTrainerSeparateAsync, {"add_replicas_to_balancer", "clear_sticky_cache"}),
        (engine.OnePassMixin, FSDPEngineWithLMHead, {"prepare_model_outputs", "forward_step"}),
        (agent_gradients.AgentGradientsMixin, FSDPEngineWithLMHead, {"forward_backward_batch"}),
        (update_step.UpdateStepMixin, FSDPEngineWithLMHead, {"train_batch", "optimizer_step"}),
        (dvp.PrunedClientMixin, LLMServerClient, {"generate"}),
        (CpuFsdpMixin, FSDPEngineWithLMHead, {"__init__", "_build_module", "_build_fsdp_module"}),
    ],
)
def test_each_override_is_one(mixin: type, base: type, some: set[str]) -> None:
    names = {name for name, _ in verl_api.overrides(mixin)}
    assert some <= names and all(hasattr(base, name) for name in names)
    verl_api.check_overrides(mixin, base)
    for name in some - {"__init__"}:
        without = type(base.__name__, (), {other: getattr(base, other) for other in names - {name, "__init__"}})
        with pytest.raises(wraps.UnsupportedVerl, match=rf"{mixin.__name__} overrides .*\.{name}, which is not there"):
            verl_api.check_overrides(mixin, without)


def test_an_override_agrees_with_verl_about_the_parameters() -> None:
    class Mixin:
        def step(self, batch: Any, metrics: Any) -> Any:
            return super().step(batch, metrics)  # type: ignore[misc]

    class Renamed:
        def step(self, data: Any, metrics: Any) -> None: ...

    class More:
        def step(self, batch: Any, metrics: Any, epoch: Any) -> None: ...

    class Optional:
        def step(self, batch: Any, metrics: Any, epoch: int = 0) -> None: ...

    with pytest.raises(wraps.UnsupportedVerl, match="step, which no longer takes batch"):
        verl_api.check_overrides(Mixin, Renamed)
    with pytest.raises(wraps.UnsupportedVerl, match="step, which asks for epoch"):
        verl_api.check_overrides(Mixin, More)
    verl_api.check_overrides(Mixin, Optional)


@pytest.fixture
def late_trainer() -> Iterator[type]:
    """A trainer that somebody registers after verl's were extended."""

    @v1.register_trainer("late")
    class Late(v1.PPOTrainerSync):
        """Somebody's."""

    yield Late
    del TRAINER_REGISTRY["late"]


@pytest.mark.parametrize("module", ["verl.trainer.ppo.v1", "verl.trainer.ppo.v1.trainer_base"])
def test_a_trainer_registered_later_is_extended(
    late_trainer: type, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    get_trainer_cls = importlib.import_module(module).get_trainer_cls
    monkeypatch.delenv(plugin.STRICT, raising=False)
    assert get_trainer_cls("late") is late_trainer, "a run that is not ours gets what it has registered"
    monkeypatch.setenv(plugin.STRICT, "1")
    found = get_trainer_cls("late").__mro__
    assert found[1] is VerlExtTrainer and found[4] is late_trainer


def test_a_trainer_that_cannot_be_extended_is_refused(late_trainer: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_trainer, "_update_actor", lambda self, rows: rows)
    monkeypatch.setenv(plugin.STRICT, "1")
    with pytest.raises(wraps.UnsupportedVerl, match=r"VerlExtTrainer overrides .*Late\._update_actor.* batch, metrics"):
        v1.get_trainer_cls("late")


# ---- what has fired, what was called --------------------------------------------------------------------------------


def test_a_hook_that_never_fires_refuses_the_run(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = verl_api.hooked(config())
    assert {"verl.trainer.ppo.v1", "verl.trainer.ppo.core_algos", "verl.workers.rollout.replica"} <= set(needed)
    verl_api.require(config())
    registrations.require(needed)
    monkeypatch.setattr(registrations, "fired", registrations.fired - {"verl.trainer.ppo.v1"})
    registrations.require()
    with pytest.raises(
        registrations.PluginError, match=r"Not done .*extending verl's V1 trainers \(when verl.trainer.ppo.v1 is"
    ):
        registrations.require(needed)
    monkeypatch.setenv(plugin.STRICT, "1")
    with pytest.raises(registrations.PluginError, match="extending verl's V1 trainers"):
        v1.get_trainer_cls("sync")


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Iterator[wraps.Target]:
    module: Any = ModuleType("a_verl")
    module.function = lambda value: value
    module.Class = type("Class", (), {})
    monkeypatch.setitem(sys.modules, "a_verl", module)
    yield wraps.Target("a_verl", "function", ("value",), "verl 0.9.1", "to see it called")


def test_a_replacement_that_verl_does_not_call_is_noticed(target: wraps.Target) -> None:
    module: Any = sys.modules["a_verl"]
    elsewhere = module.function  # bound before, as `from a_verl import function` does
    for call, noticed in ((lambda: module.function(1), False), (lambda: elsewhere(1), True)):
        with wraps.replaced(target, lambda original: lambda value: original(value) + 1):
            if noticed:
                with pytest.raises(
                    wraps.UnsupportedVerl, match="a_verl.function .*no longer calls it where it is needed"
                ):
                    with wraps.must_be_called(target):
                        assert call() == 1
                with wraps.must_be_called(target, when=False):
                    assert call() == 1
            else:
                with wraps.must_be_called(target):
                    assert call() == 2
    assert module.function is elsewhere


def test_a_trainer_that_computes_advantages_elsewhere_is_refused() -> None:
    """It has bound the function before; the estimators would get no rows, and nothing would say so."""
    from verl.trainer.ppo.v1 import trainer_base

    bound = trainer_base.compute_advantage_for_multi_trajectories

    class Elsewhere:
        def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
            return bound.__name__

    class Trainer(VerlExtTrainer, Elsewhere):
        parts = (Part(None),)

        def __init__(self) -> None: ...

    with pytest.raises(wraps.UnsupportedVerl, match="compute_advantage_for_multi.* no longer calls it where"):
        Trainer()._compute_advantage(None, {})


@pytest.mark.parametrize(("loggers", "refused"), [(["console"], False), (["console", "file"], True)])
def test_a_file_logger_that_is_not_made_is_noticed(loggers: list[str], refused: bool) -> None:
    trainer = SimpleNamespace(global_steps=0)
    part = MetricsFile(OmegaConf.create({"trainer": {"logger": loggers}}), trainer)
    with pytest.raises(wraps.UnsupportedVerl, match="FileLogger .*no longer calls it") if refused else nullcontext():
        with part.around_fit():
            pass


def test_a_replaced_class_is_counted_and_stays_a_class(target: wraps.Target) -> None:
    module: Any = sys.modules["a_verl"]
    target = wraps.Target("a_verl", "Class", None, "verl 0.9.1", "to see it made")
    with wraps.must_be_called(target), wraps.replaced(target, lambda original: type("Mine", (original,), {})):
        assert type(module.Class()).__name__ == "Mine" and issubclass(module.Class, module.Class.__mro__[1])
    with pytest.raises(wraps.UnsupportedVerl):
        with wraps.must_be_called(target), wraps.replaced(target, lambda original: type("Mine", (original,), {})):
            pass


def test_a_class_is_replaced_once_for_the_life_of_the_process(target: wraps.Target) -> None:
    module: Any = sys.modules["a_verl"]

    class Made:
        def __new__(cls, size: int) -> Any:
            return size + 1

    target = wraps.Target("a_verl", "Class", ("size",), "verl 0.9.1", "to see it made")
    module.Class = type("Class", (), {"__init__": lambda self, size: None})
    wraps.replace(target, lambda original: Made)
    first = module.Class
    wraps.replace(target, lambda original: Made)  # its parameters are looked up again
    assert module.Class is first and module.Class(1) == 2


def test_an_error_inside_is_not_hidden(target: wraps.Target) -> None:
    with pytest.raises(ZeroDivisionError):
        with wraps.must_be_called(target), wraps.replaced(target, lambda original: original):
            raise ZeroDivisionError


def test_one_module_alone_calls_verls_store() -> None:
    """Its next data plane is to be met in one place: no other module imports this one, by whatever spelling."""
    package = Path(verl_ext.__file__).parent
    importers = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == "transfer_queue" for name in names):
                importers.add(path.relative_to(package).as_posix())
    assert importers == {"integration/compat/data_plane.py"}
