# SPDX-License-Identifier: Apache-2.0
"""What a user meets between the command and the first Ray process."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import copies
import pandas
import pytest
import verl  # noqa: F401  (loads the plugin)
from hydra import compose, initialize_config_module
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from verl_ext.integration import checks, launch
from verl_ext.integration.settings.options import OptionError
from verl_ext.rewards.judge import JudgeError
from verl_ext.sandbox import SandboxOptions
from verl_ext.search_path import RecipeSearchPath

pytestmark = pytest.mark.usefixtures("verl_configuration")


def config(*overrides: str) -> Any:
    return compose("ppo_trainer", overrides=list(overrides))


def test_recipe_flag_composes_and_checks() -> None:
    cfg = config("+recipe=trloo", "actor_rollout_ref.rollout.n=4")
    assert cfg.algorithm.adv_estimator == "mix"
    assert cfg.algorithm.mix == {"trloo": 1.0}
    assert checks.check(cfg) == []


def test_calls_that_wait_while_the_trainer_trains_are_warned_of() -> None:
    team = ["+recipe=trloo", "actor_rollout_ref.rollout.n=4", "+verl_ext.orchestra.name=solver_verifier"]
    assert not any("colocate_async" in warning for warning in checks.check(config(*team)))
    warnings = checks.check(config(*team, "trainer.v1.trainer_mode=colocate_async"))
    assert any("a model call that is under way waits while the trainer trains" in warning for warning in warnings)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("++verl_ext.poll_interval_s=-1", r"verl_ext\.poll_interval_s is -1"),
        ("+algorithm.trloo.baselin=mean", r"algorithm\.trloo\.baselin .*Did you mean 'baseline'"),
        ("algorithm.trloo.baseline=median", r"algorithm\.trloo\.baseline is 'median'; choose one of 'leave_one_out'"),
        ("algorithm.trloo.batch_std=1", r"algorithm\.trloo\.batch_std is 1; give true or false"),
        ("algorithm.trloo.group_by=[turn_index]", r"algorithm\.trloo\.group_by .*must name 'index'"),
        ("algorithm.gamma=1.5", r"algorithm\.gamma is 1\.5; the discount must lie in \[0, 1\]"),
        ("algorithm.gamma=-0.1", r"algorithm\.gamma is -0\.1"),
        ("+algorithm.mix.trlo=1.0", r"algorithm\.mix\.trlo: no estimator of that name.*trloo"),
        ("algorithm.mix.trloo=0", r"weight 0; nothing would be learned"),
        ("algorithm.mix.trloo=nan", r"algorithm\.mix\.trloo is nan"),
        ("trainer.use_v1=false", r"trainer\.use_v1=true"),
    ],
)
def test_bad_settings_are_named(override: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        checks.check(config("+recipe=trloo", "actor_rollout_ref.rollout.n=4", override))


def test_estimators_of_verl_that_take_rows_for_samples_are_told() -> None:
    played = "actor_rollout_ref.rollout.agent.default_agent_loop"
    common = ["actor_rollout_ref.rollout.n=4", "data.train_files=[]", "data.val_files=[]"]

    def told(recipe: str, loop: str) -> bool:
        warnings = checks.check(config(f"+recipe={recipe}", *common, f"{played}={loop}"))
        return any("verl's rloo takes each turn for a sample" in one for one in warnings)

    assert told("rloo", "verl_ext_multi_turn") and told("rloo", "verl_ext_orchestra")
    assert not told("rloo", "single_turn_agent") and not told("grpo", "verl_ext_multi_turn")


def test_two_losses_are_refused_by_name() -> None:
    with pytest.raises(OptionError, match="recipes kpo and gspo each set the policy loss"):
        checks.check(config("+recipe=[grpo,kpo,gspo]", "actor_rollout_ref.rollout.n=4"))
    with pytest.raises(OptionError, match=r"recipe kpo sets the policy loss, but .*loss_mode=vanilla replaces it"):
        checks.check(config("+recipe=[grpo,kpo]", "actor_rollout_ref.actor.policy_loss.loss_mode=vanilla"))


@pytest.mark.seconds
def test_divergence_augmented_is_checked_at_launch() -> None:
    recipe = "+recipe=[grpo,divergence_augmented]"
    node = "actor_rollout_ref.actor.policy_loss"
    many = ["actor_rollout_ref.rollout.n=4", "data.train_batch_size=256"]
    assert checks.check(config(recipe, *many, "actor_rollout_ref.actor.ppo_mini_batch_size=64")) == []
    (warning,) = checks.check(config(recipe, *many, "actor_rollout_ref.actor.ppo_mini_batch_size=256"))
    assert "no effect with one update a batch" in warning
    with pytest.raises(OptionError, match=r"policy_loss\.dapo_beta is -1; it must be at least 0"):
        checks.check(config(recipe, *many, f"{node}.dapo_beta=-1"))
    with pytest.raises(OptionError, match=r"needs .*_target_=.*DivergenceAugmentedPolicyLossConfig"):
        checks.check(config("+recipe=grpo", *many, f"{node}.loss_mode=divergence_augmented"))
    with pytest.raises(OptionError, match="recipes kpo and divergence_augmented each set the policy loss"):
        checks.check(config("+recipe=[grpo,kpo,divergence_augmented]", *many))


def test_loss_recipe_alone_and_shared_discount_are_warned_about() -> None:
    (warning,) = checks.check(config("+recipe=kpo", "actor_rollout_ref.rollout.n=4"))
    assert "sets only the policy loss" in warning and "+recipe=[grpo,kpo]" in warning
    (warning,) = checks.check(config("+recipe=[trloo,hgpo,step_wise]", "actor_rollout_ref.rollout.n=4"))
    assert "share algorithm.gamma=0.95" in warning
    own = ["+algorithm.trloo.gamma=1.0", "actor_rollout_ref.rollout.n=4"]
    assert checks.check(config("+recipe=[trloo,hgpo,step_wise]", *own)) == []


@pytest.mark.parametrize(
    ("recipe", "field"),
    [("hgpo", "anchor_obs"), ("gigpo", "anchor_obs"), ("dr_mas", "agent_id"), ("trloo", "agent_id")],
)
def test_rows_of_verls_own_loops_cannot_have_what_a_method_needs(recipe: str, field: str, tmp_path: Path) -> None:
    more = ["verl_ext.agent_gradients=true"] if recipe == "trloo" else []
    loop = "actor_rollout_ref.rollout.agent.default_agent_loop"
    files = {"plain": {"prompt": ["1 + 1"]}, "named": {"agent_name": ["single_turn_agent", "my_loop"]}}
    for name, rows in files.items():
        pandas.DataFrame(rows).to_parquet(tmp_path / f"{name}.parquet")

    def check(name: str, *overrides: str) -> list[str]:
        data = [f"data.{which}_files={tmp_path / name}.parquet" for which in ("train", "val")]
        given = [f"+recipe={recipe}", "actor_rollout_ref.rollout.n=4", *more, *data]
        return checks.check(config(*given, *overrides))

    who = "verl_ext.agent_gradients" if more else recipe
    ours = "verl_ext_step_wise" if field == "anchor_obs" else "verl_ext_orchestra or verl_ext_gateway"
    needs = f"{who} needs the turn field '{field}'.*default_agent_loop=single_turn_agent.*Set it to {ours}, or to a"
    with pytest.raises(OptionError, match=needs):
        check("plain")
    for legal in (
        f"{loop}=my_loop",
        f"{loop}=verl_ext_orchestra",
        "+actor_rollout_ref.rollout.agent.agent_loop_manager_class=a.B",
    ):
        assert check("plain", legal.replace("+actor", "++actor")) == []
    assert check("named") == check("plain", "actor_rollout_ref.rollout.agent.agent_loop_config_path=loops.yaml") == []
    for warned in (check("absent"), check("plain", f"{loop}=tool_agent")):  # data elsewhere; tools may say it
        assert len(warned) == 1 and f"needs the turn field '{field}'" in warned[0] and "unless the data's" in warned[0]


def test_a_method_that_reads_none_of_it_runs_with_verls_loop(tmp_path: Path) -> None:
    pandas.DataFrame({"prompt": ["1 + 1"]}).to_parquet(tmp_path / "rows.parquet")
    data = [f"data.{which}_files={tmp_path}/rows.parquet" for which in ("train", "val")]
    for given in (["+recipe=trloo"], ["+recipe=dr_mas", "algorithm.dr_mas.level=global_rows"], ["+recipe=otb"]):
        assert checks.check(config(*given, "actor_rollout_ref.rollout.n=4", *data)) == []


def test_an_agents_statistics_are_of_the_level_agent() -> None:
    given = ["+recipe=dr_mas", "actor_rollout_ref.rollout.n=4", "algorithm.dr_mas.level=global"]
    with pytest.raises(OptionError, match="statistics=mean with level=global.* Set algorithm.dr_mas.level=agent"):
        checks.check(config(*given, "algorithm.dr_mas.statistics=mean"))


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.rollout_correction.bypass_mode=true", "bypass_mode=true skips that pass"),
        ("actor_rollout_ref.model.use_fused_kernels=true", "use_fused_kernels=false"),
        ("actor_rollout_ref.actor.strategy=torchtitan", "verl's 'torchtitan' engine does not compute it"),
    ],
)
def test_otb_is_refused_where_its_input_cannot_be_had(override: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        checks.check(config("+recipe=otb", "actor_rollout_ref.rollout.n=4", override))


def test_otb_has_its_input_from_veomni() -> None:
    """Its engine is verl's FSDP one there; by its source, since veomni itself is not installed with the tests."""
    checks.check(config("+recipe=otb", "actor_rollout_ref.rollout.n=4", "actor_rollout_ref.actor.strategy=veomni"))
    source = Path(verl.__path__[0], "workers/engine/veomni/transformer_impl.py").read_text()
    (engine,) = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == "VeOmniEngineWithLMHead"
    ]
    assert "FSDPEngineWithLMHead" in [ast.unparse(base) for base in engine.bases]
    methods = {node.name: ast.unparse(node) for node in engine.body if isinstance(node, ast.FunctionDef)}
    assert "super().prepare_model_outputs(" in methods["prepare_model_outputs"]
    assert "FSDPEngine)" in source and "from ..fsdp" in source.replace("verl.workers.engine.fsdp", "..fsdp")


MULTI_TURN = "actor_rollout_ref.rollout.agent.default_agent_loop=verl_ext_multi_turn"
KL_LOSS = "actor_rollout_ref.actor.use_kl_loss=true"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["+algorithm.mix.gae=0.5"], r"algorithm\.mix\.gae needs the values of a critic.*Set critic\.enable=true"),
        (["+algorithm.mix.remax=0.5"], r"algorithm\.mix\.remax needs the rewards of greedy rollouts"),
        (["algorithm.adv_estimator=gdpo"], r"algorithm\.adv_estimator=gdpo needs prompts and rewards"),
        (["algorithm.use_pf_ppo=true"], r"algorithm\.use_pf_ppo=true draws sequences anew"),
        (["algorithm.adv_estimator=grrpo"], r"=grrpo is no estimator that is registered\. Did you mean 'grpo'\?"),
        (["+algorithm.mix.grpo_passk=0.5", "actor_rollout_ref.rollout.n=1"], r"mix\.grpo_passk compares the two best"),
        (["actor_rollout_ref.actor.policy_loss.loss_mode=kppo"], r"loss_mode=kppo is not known .*modes are: .*'gspo'"),
        ([KL_LOSS, "actor_rollout_ref.actor.kl_loss_type=k9"], r"actor\.kl_loss_type=k9 is not known to verl"),
        (["algorithm.use_kl_in_reward=true", "algorithm.kl_penalty=full"], r"algorithm\.kl_penalty=full is not known"),
        ([f"{MULTI_TURN}s"], r"there is no agent loop 'verl_ext_multi_turns'\. Did you mean 'verl_ext_multi_turn'\?"),
        ([MULTI_TURN, "actor_rollout_ref.rollout.enable_rollout_routing_replay=true"], "does not hand on the routed"),
        ([MULTI_TURN, "data.max_response_length=4096"], "after one of 512 tokens or more there is none"),
        (["++verl_ext.one_pass=true", "actor_rollout_ref.actor.strategy=megatron"], "one_pass=true reads the logits"),
        (["++verl_ext.one_pass=true", "actor_rollout_ref.model.use_fused_kernels=true"], "one_pass=true with"),
    ],
)
def test_what_has_no_effect_or_fails_after_a_rollout_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        checks.check(config("+recipe=trloo", "actor_rollout_ref.rollout.n=4", *overrides))


def test_a_name_that_the_workers_alone_may_know_is_left_to_them() -> None:
    theirs = ["actor_rollout_ref.model.external_lib=theirs", "algorithm.adv_estimator=theirs"]
    checks.check(config("+recipe=mrs", *theirs, "actor_rollout_ref.actor.policy_loss.loss_mode=theirs"))


def test_the_learning_rate_of_a_critic_on_another_engine_is_refused() -> None:
    recipe = ["+recipe=[trloo,length_lr]", "actor_rollout_ref.rollout.n=4", "critic.enable=true"]
    checks.check(config(*recipe))
    with pytest.raises(OptionError, match=r"verl's FSDP engine; critic\.strategy=megatron has none of its code"):
        checks.check(config(*recipe, "critic.strategy=megatron"))


def test_lengths_without_room_for_a_turn_after_the_longest_answer_are_warned_of() -> None:
    multi = ["+recipe=trloo", "actor_rollout_ref.rollout.n=4", MULTI_TURN]
    (warning,) = checks.check(config(*multi))  # verl's defaults, 512 of each
    assert "after one of 512 tokens or more there is none. Raise data.max_prompt_length" in warning
    assert checks.check(config(*multi, "data.max_prompt_length=1024")) == []
    assert checks.check(config(*multi, "+actor_rollout_ref.rollout.custom.multi_turn.max_turns=1")) == []


def test_recipes_mix_by_union() -> None:
    loop = "actor_rollout_ref.rollout.agent.default_agent_loop=verl_ext_gateway"
    cfg = config("+recipe=[dr_mas,otb,kpo]", "actor_rollout_ref.rollout.n=4", loop)
    assert cfg.algorithm.mix == {"dr_mas": 1.0, "otb": 1.0} and cfg.algorithm.adv_estimator == "mix"
    assert cfg.actor_rollout_ref.actor.policy_loss.loss_mode == "kpo"
    assert checks.check(cfg) == []


@pytest.mark.seconds
@pytest.mark.parametrize("name", ["trloo", "dr_mas", "hgpo", "gigpo", "grpo", "rloo"])
def test_an_estimator_recipe_touches_the_algorithm_only(name: str) -> None:
    """Without `cpu`, rollout, engine and trainer stay verl's own: on a GPU they are untouched."""
    stock, ours = config(), config(f"+recipe={name}")
    for key in stock:
        if key != "algorithm":
            assert ours[key] == stock[key], key
    assert set(ours) - set(stock) == {"verl_ext"}


def test_one_rollout_a_prompt_is_warned_about() -> None:
    (warning,) = checks.check(config("+recipe=trloo"))
    assert "rollout.n=1" in warning and "REINFORCE without a baseline" in warning and "2 or more" in warning


@pytest.mark.seconds
def test_a_mistake_ends_the_run_with_one_line() -> None:
    """Hydra turns an exception of a callback into a warning; SystemExit it lets through."""
    with pytest.raises(SystemExit, match="verl_ext: algorithm.gamma is 2"):
        launch.LaunchCallback().on_run_start(config("+recipe=trloo", "algorithm.gamma=2"))


def test_every_process_of_the_run_loads_the_plugin_or_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "mine")
    cfg = config(
        "+recipe=trloo",
        "actor_rollout_ref.rollout.n=4",
        "+ray_kwargs.ray_init.runtime_env.env_vars={MINE: a, VERL_EXT_STRICT: '0'}",
    )
    launch.prepare(cfg)
    variables = OmegaConf.to_container(cfg.ray_kwargs.ray_init.runtime_env.env_vars)
    assert json.loads(variables.pop("VERL_EXT_SANDBOX"))["cage"] == "required"
    assert variables.pop("VERL_EXT_NAMES") == "mix,trloo"
    assert variables == {"MINE": "a", "VERL_EXT_STRICT": "0", "VERL_USE_EXTERNAL_MODULES": "mine,verl_ext.plugin"}


def test_a_job_that_was_submitted_with_variables_of_its_own_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ray job submit --runtime-env-json`: Ray merges no two values of one variable, equal ones included."""
    from ray.runtime_env.runtime_env import _merge_runtime_env
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    job = {"env_vars": {"OMP_NUM_THREADS": "2", "VERL_USE_EXTERNAL_MODULES": "mine", "VERL_EXT_STRICT": "1"}}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"runtime_env": job}))
    for name, value in job["env_vars"].items():  # as Ray starts the launcher of a job
        monkeypatch.setenv(name, value)
    cfg = config("+recipe=trloo", "actor_rollout_ref.rollout.n=4", "+verl_ext.env.OMP_NUM_THREADS=1")
    launch.prepare(cfg)
    asked = OmegaConf.merge(get_ppo_ray_runtime_env(cfg), cfg.ray_kwargs.ray_init.runtime_env)
    merged = _merge_runtime_env(job, OmegaConf.to_container(asked))
    assert merged is not None and merged["env_vars"]["OMP_NUM_THREADS"] == "2"
    assert merged["env_vars"]["VERL_EXT_NAMES"] == "mix,trloo"
    job["env_vars"]["VERL_EXT_STRICT"] = "0"
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"runtime_env": job}))
    with pytest.raises(OptionError, match="submitted with VERL_EXT_STRICT=0; this run sets 1"):
        launch.prepare(config("+recipe=trloo", "actor_rollout_ref.rollout.n=4"))


@pytest.mark.seconds
def test_the_sandbox_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    launch.prepare(config("+recipe=trloo", "actor_rollout_ref.rollout.n=4", "verl_ext.sandbox.cage=auto"))
    assert "verl_ext sandbox: auto: rlimits, seccomp, Landlock" in capsys.readouterr().out
    for wrong, message in (
        ("verl_ext.sandbox.cage=strict", "sandbox.cage is 'strict'"),
        ("+verl_ext.sandbox.cgae=auto", "sandbox.cgae is not an option"),
    ):
        with pytest.raises(OptionError, match=message):
            launch.prepare(config("+recipe=trloo", "actor_rollout_ref.rollout.n=4", wrong))


def test_a_mathematics_reward_that_misjudges_ends_the_run_at_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["+recipe=trloo", "actor_rollout_ref.rollout.n=4"]
    asked.append("reward.custom_reward_function.path=pkg://verl_ext.rewards.math")
    launch.prepare(config(*asked))
    (tmp_path / "math_verify.py").write_text(
        "def parse(text, **_): return [text]\ndef verify(one, other, **_): return False"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(JudgeError, match=r"does not see that '0\.5' is .*frac.*no verdict of it can be trusted"):
        launch.prepare(config(*asked))


def test_the_sandbox_has_the_defaults_of_its_recipes() -> None:
    recipe = OmegaConf.to_container(config("+recipe=trloo").verl_ext.sandbox)
    assert recipe == dataclasses.asdict(SandboxOptions())


def test_run_of_a_half_loaded_plugin_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_ext.integration.compat import registrations

    monkeypatch.setitem(registrations.failures, "registering the estimators and losses", "ImportError: torn")
    with pytest.raises(
        SystemExit, match="only partly loaded.*registering the estimators and losses: ImportError: torn"
    ):
        launch.LaunchCallback().on_run_start(config("+recipe=trloo", "actor_rollout_ref.rollout.n=4"))


def main_ppo(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return copies.python("-m", "verl.trainer.main_ppo", *words, env={**os.environ, **environment}, timeout=300)


@pytest.mark.slow
def test_unknown_recipe_lists_the_known_ones(tmp_path: Path) -> None:
    done = main_ppo("+recipe=trlo", f"hydra.run.dir={tmp_path}")
    assert done.returncode != 0
    assert "Could not find 'recipe/trlo'" in done.stderr and "\ttrloo\n" in done.stderr and "\tcpu\n" in done.stderr


@pytest.mark.slow
def test_misspelt_key_ends_the_command_before_ray(tmp_path: Path) -> None:
    done = main_ppo("+recipe=[trloo,cpu]", "+algorithm.trloo.baselin=mean", f"hydra.run.dir={tmp_path}")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("verl_ext: algorithm.trloo.baselin is not an option of trloo.")
    assert "ray init" not in done.stdout


@pytest.mark.slow
def test_plugin_that_breaks_is_heard(tmp_path: Path) -> None:
    """verl swallows a plugin's exception at DEBUG; ours says so on stderr and the recipe does not start."""
    (tmp_path / "wrapt.py").write_text("raise ImportError('no wrapt today')\n")
    done = main_ppo("+recipe=trloo", f"hydra.run.dir={tmp_path}", PYTHONPATH=str(tmp_path))
    assert done.returncode != 0
    assert "verl_ext: preparing the registrations failed (ImportError: no wrapt today)" in done.stderr
    assert "pip install" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("verl_ext: verl_ext is only partly loaded, so no recipe of it can run. preparing the reg")


@pytest.mark.slow
def test_a_recipe_with_the_plugin_hidden_from_verl_is_refused(tmp_path: Path) -> None:
    """The recipe was a plain key then, and the run had verl's own loss."""
    done = main_ppo("+recipe=kpo", f"hydra.run.dir={tmp_path}", VERL_USE_EXTERNAL_PLUGINS="none")
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and "hidden by VERL_USE_EXTERNAL_PLUGINS='none'" in last, last


@pytest.mark.slow
def test_a_package_that_hides_the_namespace_of_hydras_plugins_hides_no_recipe(tmp_path: Path) -> None:
    """Its ``hydra_plugins/__init__.py`` makes a package of the namespace, in which Hydra finds no other plugin. Without
    what verl's plugin registers with Hydra the recipe would be a plain key there, and the loss verl's."""
    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins" / "__init__.py").touch()
    done = main_ppo("--cfg=job", "+recipe=kpo", f"hydra.run.dir={tmp_path}", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0 and "loss_mode: kpo" in done.stdout and "recipe: kpo" not in done.stdout


def test_on_a_machine_without_us_a_recipe_may_be_asked_for_so_that_hydra_refuses(
    monkeypatch: pytest.MonkeyPatch, verl_configuration: None
) -> None:
    assert config("+recipe@_global_=[grpo,kpo]") == config("+recipe=[grpo,kpo]")
    GlobalHydra.instance().clear()
    monkeypatch.setattr(RecipeSearchPath, "manipulate_search_path", lambda self, search_path: None)
    with initialize_config_module("verl.trainer.config", version_base=None):
        assert config("+recipe=kpo").actor_rollout_ref.actor.policy_loss.loss_mode == "vanilla"  # a plain key
        with pytest.raises(ConfigCompositionException, match="config group 'recipe' does not exist"):
            config("+recipe@_global_=kpo")


@pytest.mark.parametrize(("name", "said"), [("kpo/math", "'kpo/math' is the table of a paper"), ("kpo", "no folder")])
def test_what_is_no_recipe_is_refused_by_hydras_search_path(
    name: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if name == "kpo":  # of an installation that is torn
        monkeypatch.setattr("verl_ext.recipes.__file__", str(tmp_path / "verl_ext" / "recipes.py"))
    monkeypatch.setattr(sys, "argv", ["main_ppo", f"+recipe={name}"])
    with pytest.raises(SystemExit, match=f"verl_ext: {said}"):
        RecipeSearchPath().manipulate_search_path(ConfigSearchPathImpl())
    monkeypatch.setattr(sys, "argv", ["a program that is none of ours"])
    RecipeSearchPath().manipulate_search_path(ConfigSearchPathImpl())


@pytest.mark.slow
def test_plugin_that_breaks_leaves_stock_verl_alone(tmp_path: Path) -> None:
    (tmp_path / "wrapt.py").write_text("raise ImportError('no wrapt today')\n")
    done = main_ppo("--cfg=job", f"hydra.run.dir={tmp_path}", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0 and "adv_estimator: gae" in done.stdout


@pytest.mark.parametrize("recipe", ["grpo", "gspo", "dvp", "step_wise"])
def test_the_legacy_trainer_is_refused_with_any_recipe(recipe: str) -> None:
    """Without a row field among its needs a recipe would start there, and train on other advantages without a word."""
    cfg = config(f"+recipe={recipe}", "actor_rollout_ref.rollout.n=4", "trainer.use_v1=false")
    with pytest.raises(
        SystemExit, match=r"verl_ext: trainer\.use_v1=false, but every recipe .* Set trainer\.use_v1=true"
    ):
        launch.LaunchCallback().on_run_start(cfg)


def test_another_verl_is_not_refused_for_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verl, "__version__", "0.10.0")
    launch.prepare(config("+recipe=trloo", "actor_rollout_ref.rollout.n=4"))


def test_what_verl_lacks_ends_the_run_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.utils.tokenizer.continuous_token import ContinuousTokenBuilder

    for spelling in ("merge_context_tokens", "merge_non_assistant_tokens"):
        if hasattr(ContinuousTokenBuilder, spelling):
            monkeypatch.delattr(ContinuousTokenBuilder, spelling)
    loop = "actor_rollout_ref.rollout.agent.default_agent_loop=verl_ext_multi_turn"
    with pytest.raises(
        SystemExit, match="verl_ext: this verl lacks 1 .*merge_context_tokens or .*merge_non_assistant_tok"
    ):
        launch.LaunchCallback().on_run_start(config("+recipe=grpo", "actor_rollout_ref.rollout.n=4", loop))


HEAD = """
import verl
from hydra import compose, initialize_config_module
from verl_ext.integration import launch

with initialize_config_module("verl.trainer.config", version_base=None):
    given = ["+recipe=[trloo,otb,kpo,dvp]", "actor_rollout_ref.rollout.n=4", "actor_rollout_ref.rollout.name=vllm"]
    config = compose("ppo_trainer", overrides=given)
launch.prepare(config)
"""


@pytest.mark.slow
def test_a_head_node_without_a_gpu_starts_a_run(tmp_path: Path) -> None:
    """Megatron is installed there and cannot be imported, which verl takes for an ImportError alone."""
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "__init__.py").write_text("raise OSError('libcuda.so.1: cannot open shared object file')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", HEAD], capture_output=True, text=True, env=environment, timeout=300, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "verl_ext: some of verl can be looked at only where it runs (OSError: libcuda.so.1: cannot" in done.stdout


def test_gspo_has_its_own_clip_range() -> None:
    """arXiv 2507.18071, section 5.1: 3e-4 and 4e-4; verl's default of 0.2 never clips the ratio of a sequence."""
    actor = config("+recipe=[grpo,gspo]").actor_rollout_ref.actor
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (3e-4, 4e-4)


SHOW = """
import json, os, hydra, verl
from omegaconf import OmegaConf

@hydra.main(config_path="pkg://verl.trainer.config", config_name="ppo_trainer", version_base=None)
def main(config):
    variables = OmegaConf.to_container(config.ray_kwargs.ray_init.runtime_env.env_vars)
    told = [config.algorithm.gamma, config.ray_kwargs.ray_init.num_gpus, variables, "VERL_EXT_STRICT" in os.environ]
    print("job", json.dumps(told), flush=True)

main()
"""


def sweep(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "show.py").write_text(SHOW)
    given = ["+recipe=[trloo,cpu]", "actor_rollout_ref.rollout.n=4", f"hydra.sweep.dir={tmp_path}", *words]
    return copies.python(tmp_path / "show.py", "-m", *given, timeout=240)


@pytest.mark.slow
def test_each_job_of_a_multirun_is_checked_and_completed(tmp_path: Path) -> None:
    done = sweep(tmp_path, "algorithm.gamma=0.9,0.5", "+verl_ext.env.TRIED_BY=${algorithm.gamma}")
    assert done.returncode == 0, done.stderr[-3000:]
    jobs = [json.loads(line.removeprefix("job ")) for line in done.stdout.splitlines() if line.startswith("job ")]
    assert [(gamma, gpus, strict) for gamma, gpus, _, strict in jobs] == [(0.9, 1, True), (0.5, 1, True)]
    told = [
        {name: variables[name] for name in ("VERL_EXT_STRICT", "VERL_PLATFORM", "TRIED_BY")}
        for *_, variables, _ in jobs
    ]
    assert told == [{"VERL_EXT_STRICT": "1", "VERL_PLATFORM": "cpu", "TRIED_BY": gamma} for gamma in ("0.9", "0.5")]


@pytest.mark.slow
def test_a_mistake_in_a_job_of_a_multirun_ends_it_with_one_line(tmp_path: Path) -> None:
    done = sweep(tmp_path, "algorithm.gamma=1.5,0.5")
    assert done.returncode != 0 and "job " not in done.stdout
    assert done.stderr.splitlines()[-1].startswith("verl_ext: algorithm.gamma is 1.5; the discount must lie in [0, 1]")
