# SPDX-License-Identifier: Apache-2.0
"""Every full-scale cell against verl's own configuration and checks, and the launch scripts against the tables."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import verl  # noqa: F401  (loads the plugin)
from hydra import compose
from omegaconf import OmegaConf
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config

from verl_ext.cli import main as cli
from verl_ext.integration import launch
from verl_ext.integration.parts import uses_verl_ext
from verl_ext.lab.reproduce import command, plan
from verl_ext.lab.reproduce.catalogue import find_table, tables
from verl_ext.lab.reproduce.prepare import find_source
from verl_ext.lab.reproduce.tables import Cell, Table
from verl_ext.rewards import math
from verl_ext.sandbox import Sandbox

TABLES = tables()
#: Every cell; those after a table's first two are marked slow, since each composition takes a third of a second.
CELLS = [
    pytest.param(table, table.full.cells[name], id=f"{table.name}-{name}", marks=[pytest.mark.slow] * (place > 1))
    for table in TABLES
    for place, name in enumerate(reversed(table.full.runnable))
]
INPUTS = {
    "RETRIEVER_URL": "http://127.0.0.1:8000/retrieve",
    "COLD_START_MODEL": "/models/cold_start",
    "ALFWORLD_DATA": "/games",
    "PYTHONPATH": os.environ.get("PYTHONPATH", "/webshop"),
}
pytestmark = pytest.mark.usefixtures("verl_configuration")
ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
VALIDATION = f"{ROLLOUT}.val_kwargs"

#: What the launch scripts of the papers say, typed from them, by table.
PUBLISHED_SETTINGS: dict[str, dict[str, Any]] = {
    "dr_mas/math": {
        "actor_rollout_ref.model.path": "Qwen/Qwen3-4B",
        "data.train_batch_size": 32,
        f"{ROLLOUT}.n": 8,
        "data.max_prompt_length": 8192,
        "data.max_response_length": 4096,
        f"{ACTOR}.optim.lr": 1e-6,
        "verl_ext.updates_per_batch": 1,
        f"{ACTOR}.use_kl_loss": False,
        f"{ACTOR}.entropy_coeff": 0,
        "verl_ext.orchestra.options.max_loops": 2,
        "algorithm.dr_mas.invalid_action_penalty_coef": 0.1,
        "algorithm.dr_mas.epsilon": 1e-6,
        "algorithm.norm_adv_by_std_in_grpo": True,
        f"{ROLLOUT}.temperature": 1.0,
        f"{VALIDATION}.temperature": 0.6,
        f"{VALIDATION}.top_p": 0.95,
        f"{VALIDATION}.n": 16,
        "trainer.total_epochs": 2,
        "trainer.n_gpus_per_node": 4,
        "data.apply_chat_template_kwargs.enable_thinking": False,
    },
    "dr_mas/search": {
        "actor_rollout_ref.model.path": "Qwen/Qwen2.5-7B",
        "data.train_batch_size": 128,
        f"{ROLLOUT}.n": 5,
        "data.max_prompt_length": 4096,
        "data.max_response_length": 800,
        f"{ACTOR}.optim.lr": 1e-6,
        "verl_ext.updates_per_batch": 5,
        f"{ACTOR}.use_kl_loss": False,
        f"{ACTOR}.entropy_coeff": 0.001,
        "verl_ext.orchestra.options.max_steps": 4,
        "verl_ext.orchestra.options.top_k": 3,
        "algorithm.dr_mas.invalid_action_penalty_coef": 0.01,
        f"{VALIDATION}.temperature": 0.6,
        f"{VALIDATION}.top_p": 0.95,
        f"{VALIDATION}.n": 16,
        "trainer.total_epochs": 1,
    },
    "dr_mas/math_8b": {"actor_rollout_ref.model.path": "Qwen/Qwen3-8B", "trainer.n_gpus_per_node": 8},
    "dr_mas/normalisation": {"actor_rollout_ref.model.path": "Qwen/Qwen2.5-7B", "algorithm.dr_mas.std": "released"},
    "dr_mas/search_3b": {"actor_rollout_ref.model.path": "Qwen/Qwen2.5-3B", "trainer.n_gpus_per_node": 4},
    "trloo/kernelbench": {
        "data.train_batch_size": 16,
        f"{ROLLOUT}.n": 16,
        "data.max_prompt_length": 10240,
        "data.max_response_length": 8192,
        f"{ACTOR}.optim.lr": 1e-6,
        f"{ACTOR}.optim.lr_scheduler_type": "constant",
        f"{ACTOR}.optim.weight_decay": 0.01,
        f"{ACTOR}.ppo_mini_batch_size": 16,
        "verl_ext.updates_per_batch": 1,
        f"{ACTOR}.clip_ratio_low": 0.2,
        f"{ACTOR}.clip_ratio_high": 0.28,
        f"{ACTOR}.clip_ratio_c": 3.0,
        f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm",
        f"{ACTOR}.loss_scale_factor": 3000,  # 1000, and the three turns of a trajectory, by which the loss is divided
        f"{ACTOR}.grad_clip": 1.0,
        f"{ACTOR}.use_kl_loss": False,
        f"{ACTOR}.entropy_coeff": 0,
        f"{ROLLOUT}.temperature": 1.0,
        f"{ROLLOUT}.top_p": 1.0,
        f"{ROLLOUT}.top_k": -1,
        "trainer.total_training_steps": 300,
        f"{VALIDATION}.n": 8,
        f"{VALIDATION}.temperature": 1.0,
        f"{VALIDATION}.top_p": 0.95,
        "algorithm.gamma": 1.0,
        "algorithm.rejection": {"mrs": True, "prs": True},
        "algorithm.rejection_normalise": "all",
        "algorithm.mrs.level": "geometric",
        "algorithm.mrs.lower": 0.999,
        "algorithm.mrs.upper": 1.001,
        "algorithm.mrs.veto": 1e-4,
        "algorithm.prs.threshold": 0.3,
        "algorithm.prs.factor": 0.1,
        "algorithm.prs.level": "turn",
        "algorithm.prs.speedup_threshold": None,
        "algorithm.rollout_correction.rollout_is": None,
        f"{ROLLOUT}.agent.default_agent_loop": "verl_ext_kernels",
        "verl_ext.kernels.backend": "triton",
        "verl_ext.kernels.language": "triton",
        "verl_ext.kernels.max_turns": 3,
        "verl_ext.kernels.tolerance": 1e-2,
        "verl_ext.kernels.reward": {
            "variant": "released",
            "correct_weight": 0.5,
            "speedup_weight": 0.5,
            "coverage_weight": 0.5,
            "speedup_upper": 3.0,
            "speedup_lower": 0.0,
            "penalty": 0.0,
        },
    },
    "trm/math": {
        "actor_rollout_ref.model.path": "Qwen/Qwen3-8B-Base",
        "data.train_batch_size": 32,
        f"{ROLLOUT}.n": 16,
        f"{ACTOR}.optim.lr": 1e-6,
        f"{VALIDATION}.n": 32,
        f"{VALIDATION}.top_p": 0.95,
    },
    "simpletir/math": {
        "actor_rollout_ref.model.path": "Qwen/Qwen2.5-7B",
        "data.train_batch_size": 512,
        f"{ACTOR}.ppo_mini_batch_size": 128,
        f"{ROLLOUT}.n": 16,
        "data.max_prompt_length": 16384,
        "data.max_response_length": 8000,
        f"{ROLLOUT}.max_model_len": 1024 + 16384,
        f"{VALIDATION}.n": 32,
        f"{VALIDATION}.temperature": 1.0,
        f"{ACTOR}.entropy_coeff": 0,
        "trainer.total_training_steps": 1200,
        f"{ACTOR}.optim.lr": 1e-6,
        f"{ACTOR}.clip_ratio_low": 0.2,
        f"{ACTOR}.clip_ratio_high": 0.28,
        f"{ACTOR}.clip_ratio_c": 3.0,
        f"{ACTOR}.use_kl_loss": False,
        f"{ROLLOUT}.temperature": 1.0,
        "verl_ext.orchestra.options.max_turns": 5,
    },
    "empg/alfworld": {
        "actor_rollout_ref.model.path": "Qwen/Qwen2.5-1.5B-Instruct",
        "trainer.total_training_steps": 150,
    },
    "empg/webshop": {
        "actor_rollout_ref.model.path": "Qwen/Qwen2.5-1.5B-Instruct",
        "trainer.total_training_steps": 150,
        "verl_ext.environment.template": "webshop",
    },
    "empg/alfworld_7b": {"actor_rollout_ref.model.path": "Qwen/Qwen2.5-7B-Instruct"},
    "empg/webshop_7b": {"actor_rollout_ref.model.path": "Qwen/Qwen2.5-7B-Instruct"},
    "maxrl/gsm8k": {
        "actor_rollout_ref.model.path": "HuggingFaceTB/SmolLM2-360M-Instruct",
        "data.train_batch_size": 256,
        f"{ROLLOUT}.n": 128,
        "data.max_prompt_length": 512,
        "data.max_response_length": 2048,
        f"{ACTOR}.optim.lr": 1e-5,
        f"{ACTOR}.ppo_mini_batch_size": 256,
        f"{ACTOR}.use_kl_loss": False,
        f"{VALIDATION}.temperature": 0.6,
        f"{VALIDATION}.top_p": 0.95,
        "trainer.total_epochs": 200,
    },
    "hgpo/alfworld": {
        "actor_rollout_ref.model.path": "Qwen/Qwen2.5-1.5B-Instruct",
        "data.train_batch_size": 16,
        f"{ROLLOUT}.n": 8,
        "data.max_prompt_length": 4096,
        "data.max_response_length": 512,
        f"{ACTOR}.optim.lr": 1e-6,
        f"{ACTOR}.use_kl_loss": True,
        f"{ACTOR}.kl_loss_coef": 0.01,
        f"{ACTOR}.kl_loss_type": "low_var_kl",
        f"{ACTOR}.clip_ratio_low": 0.2,
        f"{ACTOR}.clip_ratio_high": 0.2,
        f"{ACTOR}.clip_ratio_c": 3.0,
        f"{ACTOR}.loss_agg_mode": "token-mean",
        f"{ACTOR}.entropy_coeff": 0.001,
        "trainer.total_training_steps": 160,
        f"{ROLLOUT}.temperature": 1.0,
        f"{VALIDATION}.temperature": 0.4,
        "verl_ext.environment.max_steps": 50,
        "verl_ext.environment.reward_scale": 10.0,
        "algorithm.gamma": 0.95,
    },
    "hgpo/alfworld_7b": {
        "actor_rollout_ref.model.path": "Qwen/Qwen2.5-7B-Instruct",
        "verl_ext.environment.max_steps": 50,
        "trainer.total_training_steps": 160,
        "algorithm.gamma": 0.95,
        "trainer.n_gpus_per_node": 4,
    },
    "hgpo/webshop": {
        "actor_rollout_ref.model.path": "Qwen/Qwen2.5-1.5B-Instruct",
        "data.max_prompt_length": 4096,
        "verl_ext.environment.max_steps": 30,
        f"{ACTOR}.ppo_mini_batch_size": 8,  # times 8 samples: 64 rows
        "trainer.total_training_steps": 160,
        f"{ACTOR}.kl_loss_coef": 0.01,
        "algorithm.gamma": 0.95,
    },
    "hgpo/webshop_7b": {
        "actor_rollout_ref.model.path": "Qwen/Qwen2.5-7B-Instruct",
        "verl_ext.environment.max_steps": 30,
    },
    "gigpo/alfworld": {
        "data.max_prompt_length": 2048,
        "data.max_response_length": 512,
        "data.train_batch_size": 16,
        f"{ROLLOUT}.n": 8,
        "verl_ext.environment.max_steps": 50,
        "trainer.total_training_steps": 150,
    },
    "gigpo/webshop": {
        "data.max_prompt_length": 4096,
        "verl_ext.environment.max_steps": 15,
        f"{ACTOR}.ppo_mini_batch_size": 8,
    },
    "kpo/math": {
        "actor_rollout_ref.model.path": "Qwen/Qwen3-4B",
        "data.train_batch_size": 32,
        f"{ROLLOUT}.n": 8,
        f"{ACTOR}.ppo_mini_batch_size": 8,
        "data.max_prompt_length": 1024,
        "data.max_response_length": 4096,
        f"{ACTOR}.optim.lr": 1e-6,
        f"{ACTOR}.optim.lr_warmup_steps_ratio": 0.05,
        f"{ACTOR}.optim.weight_decay": 0.1,
        f"{ACTOR}.grad_clip": 1.0,
        f"{ROLLOUT}.temperature": 1.0,
        f"{ACTOR}.use_kl_loss": False,
        f"{ACTOR}.entropy_coeff": 0,
        "trainer.total_epochs": 2,
        "trainer.n_gpus_per_node": 2,
        f"{VALIDATION}.n": 16,
        f"{VALIDATION}.temperature": 1.0,
        f"{VALIDATION}.top_p": 0.7,
        "data.apply_chat_template_kwargs.enable_thinking": False,
    },
    "otb/samples": {
        "data.train_batch_size": 128,
        f"{ACTOR}.optim.lr": 1e-6,
        "data.max_response_length": 8192,
        f"{ACTOR}.ppo_mini_batch_size": 128,
    },
    "otb/single_turn": {
        "actor_rollout_ref.model.path": "Qwen/Qwen3-8B-Base",
        "data.train_batch_size": 128,
        f"{ACTOR}.ppo_mini_batch_size": 128,
        "data.max_response_length": 8192,
        f"{ROLLOUT}.n": 16,
    },
    "otb/tools": {
        "actor_rollout_ref.model.path": "Qwen/Qwen2.5-7B",
        "data.train_batch_size": 128,
        f"{ACTOR}.ppo_mini_batch_size": 128,
        "verl_ext.updates_per_batch": 1,
        "data.max_response_length": 8192,
        f"{ROLLOUT}.n": 16,
        "verl_ext.orchestra.options.max_turns": 5,
    },
    "dvp/stability": {
        "actor_rollout_ref.model.path": "Qwen/Qwen3-8B-Base",
        "data.train_batch_size": 64,
        f"{ACTOR}.ppo_mini_batch_size": 64,
        f"{ROLLOUT}.n": 8,
        "data.max_response_length": 8192,
        f"{ACTOR}.optim.lr": 1e-6,
        f"{ACTOR}.clip_ratio_low": 0.2,
        f"{ACTOR}.clip_ratio_high": 0.28,
        f"{ACTOR}.clip_ratio_c": 10.0,
        f"{ACTOR}.use_kl_loss": False,
        "algorithm.rollout_correction.rollout_is_threshold": 2.0,
    },
}

#: What single cells say.
CELL_SETTINGS: dict[tuple[str, str], dict[str, Any]] = {
    ("dr_mas/math", "dr_mas"): {"algorithm.mix": {"dr_mas": 1.0}, "algorithm.dr_mas.level": "agent"},
    ("dr_mas/math", "grpo"): {"algorithm.dr_mas.level": "global"},
    ("dr_mas/math", "dr_mas_two_sizes"): {
        "algorithm.dr_mas.level": "agent",
        "verl_ext.models.verifier.model": {"path": "Qwen/Qwen3-1.7B"},
        "verl_ext.orchestra.agents": {"verifier": {"model": "verifier"}},
    },
    ("dr_mas/search", "grpo"): {"algorithm.dr_mas.level": "global"},
    ("dr_mas/normalisation", "agent_mean"): {
        "algorithm.dr_mas.level": "agent",
        "algorithm.dr_mas.statistics": "mean",
        "verl_ext.orchestra.agents": {name: {"model": name} for name in ("searcher", "answerer")},
    },
    ("dr_mas/normalisation", "agent_std"): {"algorithm.dr_mas.level": "agent", "algorithm.dr_mas.statistics": "std"},
    ("dr_mas/search", "grpo_two_sizes"): {
        "algorithm.dr_mas.level": "global",
        "actor_rollout_ref.model.path": "Qwen/Qwen2.5-7B",
        "trainer.validation_data_dir": None,
        "verl_ext.models.searcher.model": {"path": "meta-llama/Llama-3.2-3B-Instruct"},
        "verl_ext.models.answerer.model": {"path": "meta-llama/Llama-3.2-3B-Instruct"},
        "verl_ext.orchestra.agents": {name: {"model": name} for name in ("searcher", "answerer")},
    },
    ("trloo/kernelbench", "trloo"): {"algorithm.trloo.baseline": "leave_one_out", "algorithm.trloo.batch_std": False},
    ("trloo/kernelbench", "grpo_turn"): {"algorithm.trloo.baseline": "mean"},
    ("trloo/kernelbench_14b", "trloo"): {"verl_ext.kernels.stts.iterations": 0},
    ("trloo/kernelbench_14b", "stts_last"): {
        "verl_ext.kernels.stts": {"iterations": 10, "turns": 5, "window": 4, "select": "paper"},
        "data.max_prompt_length": 20480,
        "data.max_response_length": 8192,
        f"{VALIDATION}.n": 8,
    },
    ("hgpo/alfworld", "hgpo_k4"): {
        "algorithm.hgpo.history_length": 4,
        "algorithm.hgpo.mode": "mean_std_norm",
        "algorithm.hgpo.length_weight_alpha": 1.0,
        "algorithm.hgpo.base_group": False,
        "algorithm.hgpo.invalid_action_penalty_coef": 0.1,
    },
    ("hgpo/alfworld", "hgpo_k2"): {"algorithm.hgpo.history_length": 2},
    ("hgpo/alfworld", "gigpo_k4"): {
        "algorithm.gigpo.mode": "mean_std_norm",
        "algorithm.gigpo.step_advantage_w": 1.0,
        "verl_ext.environment.history_length": 4,
    },
    ("hgpo/webshop", "hgpo_k4"): {"algorithm.hgpo.mode": "mean_norm"},
    ("hgpo/webshop", "gigpo_k4"): {"algorithm.gigpo.mode": "mean_norm"},
    ("kpo/math", "kpo"): {
        f"{ACTOR}.policy_loss.loss_mode": "kpo",
        f"{ACTOR}.policy_loss.kalman_q": 1e-6,
        f"{ACTOR}.policy_loss.kalman_r": 1.0,
        f"{ACTOR}.policy_loss.is_clip": True,
        f"{ACTOR}.clip_ratio_low": 3e-4,
        f"{ACTOR}.clip_ratio_high": 4e-4,
        f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean",
    },
    ("kpo/math", "kpo_unclipped"): {f"{ACTOR}.policy_loss.is_clip": False, f"{ACTOR}.policy_loss.kalman_q": 1e-4},
    ("kpo/math", "grpo"): {
        f"{ACTOR}.policy_loss.loss_mode": "vanilla",
        f"{ACTOR}.clip_ratio_low": 0.2,
        f"{ACTOR}.clip_ratio_high": 0.2,
    },
    ("kpo/math", "gspo"): {
        f"{ACTOR}.policy_loss.loss_mode": "gspo",
        f"{ACTOR}.clip_ratio_low": 3e-4,
        f"{ACTOR}.clip_ratio_high": 4e-4,
    },
    ("kpo/math", "gmpo"): {
        f"{ACTOR}.policy_loss.loss_mode": "geo_mean",
        f"{ACTOR}.clip_ratio_low": 0.4,
        f"{ACTOR}.clip_ratio_high": 0.4,
    },
    ("otb/samples", "otb_n4"): {f"{ROLLOUT}.n": 4, "algorithm.mix": {"otb": 1.0}},
    ("otb/samples", "group_mean_n4"): {f"{ROLLOUT}.n": 4, "algorithm.norm_adv_by_std_in_grpo": False},
    ("otb/samples", "group_mean_n32"): {f"{ROLLOUT}.n": 32, "algorithm.norm_adv_by_std_in_grpo": False},
    ("trm/math", "ppo"): {f"{ACTOR}.clip_ratio_low": 0.2, f"{ACTOR}.clip_ratio_high": 0.28},
    ("trm/math", "trm"): {"algorithm.trm.max": 0.1, "algorithm.trm.avg": 0.002, "algorithm.rejection_normalise": "all"},
    ("trm/math", "trm_max"): {"algorithm.trm.max": 0.05, "algorithm.trm.avg": None},
    ("trm/math", "trm_avg"): {"algorithm.trm.max": None, "algorithm.trm.avg": 0.001},
    ("simpletir/math", "simpletir"): {
        "algorithm.rejection": {"simpletir": True, "variance_filter": True},
        "algorithm.rejection_normalise": "kept",
        "algorithm.variance_filter.threshold": 1e-3,
    },
    ("empg/alfworld", "empg"): {"algorithm.empg": {"k": 1.0, "k_f": 1.0, "zeta": 0.1}},
    ("empg/webshop", "empg"): {"algorithm.empg": {"k": 1.0, "k_f": 1.0, "zeta": 0.1}},
    ("dvp/stability", "dvp"): {"dvp.rho": 6.144e-6, f"{ROLLOUT}.top_p": 1.0, f"{ROLLOUT}.top_k": -1},
    ("dvp/stability", "dvp_bypass"): {
        "algorithm.rollout_correction.bypass_mode": True,
        "algorithm.rollout_correction.loss_type": "reinforce",
        f"{ACTOR}.policy_loss.loss_mode": "bypass_mode",
    },
}


def plain(value: Any) -> Any:
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


@pytest.fixture(scope="module", autouse=True)
def a_sandbox_is_seen_to_judge_once() -> Iterator[None]:
    """Every second cell starts one, the same, at launch, which takes three seconds of a processor."""
    check, seen = math.check, set()

    def once(sandbox: Sandbox) -> None:
        if (sandbox.limits, sandbox.cage) not in seen:
            check(sandbox)
            seen.add((sandbox.limits, sandbox.cage))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(math, "check", once)
        yield


def overrides(table: Table, cell: Cell) -> list[str]:
    words = plan.full_words(table, cell, 1, "/runs/here", "/data")
    return [plan.expand(word, table.full.needs.inputs, INPUTS) for word in words]


@pytest.mark.seconds
@pytest.mark.filterwarnings("ignore:Disabled critic")
@pytest.mark.parametrize(("table", "cell"), CELLS)
def test_cell_composes_and_is_valid(
    table: Table, cell: Cell, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "verl_ext.rollout.kernels.players.cuda.Cuda.lacks", lambda self: ""
    )  # the GPU that the cells are for
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # and not this machine's, which has none
    config = compose("ppo_trainer", overrides=overrides(table, cell))
    launch.prepare(config)
    OmegaConf.resolve(config)
    assert uses_verl_ext(config), "and so each validation says of which data set its tasks are (parts/missing.py)"
    assert not need_critic(config)
    validate_config(config, need_reference_policy(config), need_critic(config))
    assert "checks passed" in capsys.readouterr().out
    assert config.actor_rollout_ref.rollout.name == "vllm" and config.trainer.device == "cuda"
    room = config.data.max_prompt_length + config.data.max_response_length
    assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu >= room, "the longest row must fit in a micro-batch"
    assert config.data.train_batch_size * config.actor_rollout_ref.rollout.n % config.trainer.n_gpus_per_node == 0
    assert config.trainer.n_gpus_per_node % config.actor_rollout_ref.rollout.tensor_model_parallel_size == 0
    assert not config.actor_rollout_ref.model.get("use_fused_kernels", False)
    expected = {**PUBLISHED_SETTINGS.get(table.name, {}), **CELL_SETTINGS.get((table.name, cell.name), {})}
    assert {key: plain(OmegaConf.select(config, key)) for key in expected} == expected


def test_the_expectations_name_tables_and_cells() -> None:
    names = {table.name: table.full.runnable for table in TABLES}
    assert set(PUBLISHED_SETTINGS) == set(names) - {"trloo/kernelbench_14b"}
    assert all(cell in names[table] for table, cell in CELL_SETTINGS)


@pytest.mark.seconds
def test_both_kernelbench_tables_differ_in_the_model_only() -> None:
    small, large = (find_table(f"trloo/kernelbench{ending}").full for ending in ("", "_14b"))
    differing = {key for key in {**small.overrides, **large.overrides} if small.overrides[key] != large.overrides[key]}
    assert differing == {f"{ROLLOUT}.tensor_model_parallel_size"}
    assert small.models != large.models


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_metrics_can_be_logged(table: Table) -> None:
    """Keys of validation metrics name data sources of the table, and the number of samples that it draws."""
    sources = {find_source(name).data_source or find_source(name).base for name in table.full.data["val"]}
    for cell in (table.full.cells[name] for name in table.full.runnable):
        samples = plan.merged(table.full.overrides, cell.overrides).get(f"{VALIDATION}.n", 1)
        for metric in table.full.metrics.values():
            for key in metric.options.get("keys", ()):
                if key.startswith("actor/") and any("verl_ext.models." in one for one in cell.overrides):
                    assert fnmatchcase("actor/policy/grad_norm", key), "with several models each reports its own"
                if key.startswith(("val-core/", "val-aux/")):
                    section, _, rest = key.partition("/")
                    assert any(rest.startswith((f"{source}/", "*/")) for source in sources), key
                    assert rest.endswith(f"/mean@{samples}"), key
            if "source" in metric.options:
                assert metric.options["source"] in {*sources, "*"}
            if metric.kind == "pass_at_k":
                assert metric.options["k"] <= samples


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_data_sets_are_known(table: Table) -> None:
    assert table.full.data_names
    assert all(find_source(name).name == name for name in table.full.data_names)


# --- launch scripts -----------------------------------------------------------------------------------------------


def printed(table: Table, folder: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """The script that the command prints, as a file."""
    assert cli(["reproduce", "script", table.name]) == 0
    path = folder / command.script_name(table)
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    return path


def run_script(path: Path, folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a launch script with a `python` that writes down its words and the metrics file instead of training."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    listing = tools / "python"
    listing.write_text('#!/bin/sh\necho "$VERL_FILE_LOGGER_PATH"\nfor word in "$@"; do echo "$word"; done\n')
    listing.chmod(0o755)
    bash = shutil.which("bash")
    assert bash is not None
    return subprocess.run(
        [bash, str(path), *arguments],
        env={"PATH": f"{tools}:{os.environ['PATH']}", "HOME": str(folder), **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.seconds
@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_script_says_what_run_says(table: Table, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = printed(table, tmp_path, capsys)
    for cell in (table.full.cells[name] for name in table.full.runnable):
        given = {name: INPUTS[name] for name in table.full.needs.inputs}
        done = run_script(
            path,
            tmp_path,
            cell.name,
            "1",
            "a=b",
            DATA="/data",
            OUT=str(tmp_path),
            **given,
        )
        assert done.returncode == 0, done.stderr
        run = tmp_path / table.folder / "full" / cell.name / "seed_1"
        assert run.is_dir()
        metrics, *words = done.stdout.splitlines()
        assert metrics == str(run / "metrics.jsonl")
        assert words[:2] == ["-m", "verl.trainer.main_ppo"] and words[-1] == "a=b"
        expected = plan.full_words(table, cell, 1, run, "/data")
        expected = [plan.expand(word, table.full.needs.inputs, given) for word in expected]
        assert sorted(words[2:-1]) == sorted(expected)


def test_script_without_what_it_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = printed(find_table("dr_mas/search"), tmp_path, capsys)
    for arguments, environment, message in (
        ((), {}, "usage: bash dr_mas_search.sh CELL"),
        (("grpo",), {}, "RETRIEVER_URL"),
        (("gpro",), {"RETRIEVER_URL": "http://host"}, "CELL is grpo|dr_mas"),
    ):
        done = run_script(path, tmp_path, *arguments, OUT=str(tmp_path / "out"), **environment)
        assert done.returncode != 0 and message in done.stderr
        assert done.stdout == ""
    assert not (tmp_path / "out").exists()
