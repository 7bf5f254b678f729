# SPDX-License-Identifier: Apache-2.0
"""`verl_ext.models`: each model's whole config, what is refused before Ray starts, and whose rows go where."""

from __future__ import annotations

import ast
import json
import math
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import copies
import pandas
import pytest
import torch
import verl  # loads the plugin
from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager

from verl_ext import cli
from verl_ext.cpu.platform import settings
from verl_ext.integration import checks
from verl_ext.integration.columns import BatchError, has_token, is_trained
from verl_ext.integration.models import command, lead, members, separate
from verl_ext.integration.models.side import ModelSide
from verl_ext.integration.parts import reduction
from verl_ext.integration.parts.advantage.columns import Columns, engine_columns
from verl_ext.integration.settings import model_options
from verl_ext.integration.settings.options import OptionError

RUN = (
    "+recipe=[dr_mas,cpu]",
    "actor_rollout_ref.rollout.n=4",
    "verl_ext.updates_per_batch=2",
    "actor_rollout_ref.rollout.agent.default_agent_loop=verl_ext_orchestra",
    "+verl_ext.orchestra.name=solver_verifier",
)
SEPARATE = "trainer.v1.trainer_mode=separate_async"
SERVERS = (SEPARATE, "actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=1")
TWO = ("+verl_ext.models.small.trained=true", "+verl_ext.orchestra.agents.verifier.model=small")


def config(*overrides: str) -> Any:
    recipe = any(one.startswith("+recipe") for one in overrides)
    made = compose("ppo_trainer", overrides=[*RUN[recipe:], *overrides])
    checks.complete(made)
    return made


@pytest.mark.usefixtures("verl_configuration")
class TestConfiguration:
    @pytest.mark.seconds
    def test_a_model_differs_in_what_it_names_and_in_what_follows_from_it(self) -> None:
        made = config(
            *TWO,
            "+verl_ext.models.small.model.path=/models/small",
            "+verl_ext.models.small.actor.ppo_max_token_len_per_gpu=77",
            "+verl_ext.models.small.updates_per_batch=3",
            "+verl_ext.models.small.pool.n_gpus_per_node=2",
        )
        assert checks.check(made) == []
        (small,) = model_options.of(made)
        assert small.changes == {
            "actor_rollout_ref.model.path": "/models/small",
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 77,
            "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": 77,
            "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": 77,
            "actor_rollout_ref.rollout.prometheus.served_model_name": "/models/small",
        }
        checks.complete(made)
        assert model_options.of(made) == [small], "completing twice changes nothing"
        own = small.config(made)
        assert (own.trainer.n_gpus_per_node, own.trainer.nnodes) == (2, 1)
        assert own.verl_ext.updates_per_batch == 3 and made.verl_ext.updates_per_batch == 2
        assert own.actor_rollout_ref.model.path == "/models/small" != made.actor_rollout_ref.model.path
        assert "models" not in own.verl_ext and "orchestra" not in own.verl_ext
        settings.complete(made)
        assert made.ray_kwargs.ray_init.num_gpus == 3, "one of the run's and two of the model's own"

    @pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
    def test_the_servers_of_a_pool_are_told_its_gpus_of_a_node(self, mode: str) -> None:
        """They were told the run's 6: verl's replica of 8 stopped when the weights of both models were loaded."""
        pool = "+verl_ext.models.small={pool: {n_gpus_per_node: 8}, rollout: {tensor_model_parallel_size: 8}}"
        servers = ("actor_rollout_ref.rollout.nnodes=1",) if mode == "separate_async" else ()
        given = ["trainer.n_gpus_per_node=6", *servers, f"trainer.v1.trainer_mode={mode}", pool, TWO[1]]
        made = config(*given)
        (small,) = model_options.of(made)
        told = small.config(made).actor_rollout_ref.rollout.n_gpus_per_node
        assert told == (6 if mode == "separate_async" else 8) and made.actor_rollout_ref.rollout.n_gpus_per_node == 6
        if mode != "separate_async":
            checks.check(made)
        more = config(*given, "+verl_ext.models.small.rollout.n_gpus_per_node=4")
        (small,) = model_options.of(more)
        assert small.config(more).actor_rollout_ref.rollout.n_gpus_per_node == 4, "what the model says itself"

    @pytest.mark.seconds
    def test_rollout_servers_apart_from_training_are_counted_for_each_model(self) -> None:
        made = compose(
            "ppo_trainer",
            overrides=[
                *RUN,
                *TWO,
                SEPARATE,
                "trainer.n_gpus_per_node=2",
                "actor_rollout_ref.rollout.nnodes=1",
                "actor_rollout_ref.rollout.n_gpus_per_node=4",
                "+verl_ext.models.small.rollout.n_gpus_per_node=8",
                "+verl_ext.models.frozen={trained: false, pool: {n_gpus_per_node: 16}}",
                "+verl_ext.orchestra.agents.solver.model=frozen",
            ],
        )
        settings.complete(made)
        assert made.ray_kwargs.ray_init.num_gpus == 2 + 4 + 8 + 16
        checks.complete(made)
        checks.check(made)
        assert made.ray_kwargs.ray_init.num_gpus == 30

    def test_a_critic_starts_from_its_models_path_and_follows_it(self, model: Path) -> None:
        critic = "+verl_ext.models.small.critic"
        given = [*TWO, "critic.enable=true", f"critic.model.path={model}", f"{critic}.optim.lr=3e-4"]
        changed = {"critic.optim.lr": 3e-4}
        sizes = {"actor_rollout_ref.actor.ppo_mini_batch_size": 64, "critic.ppo_mini_batch_size": 64}
        path = "+verl_ext.models.small.model.path=/models/small"
        for more, expected in (
            ([], changed),
            (["+verl_ext.models.small.actor.ppo_mini_batch_size=64"], changed | sizes),
            ([path], changed | {"critic.model.path": "/models/small"}),
            ([path, f"{critic}.model.path=/other"], changed | {"critic.model.path": "/other"}),
        ):
            made = config(*given, *more)
            (small,) = model_options.of(made)
            found = {key: value for key, value in small.changes.items() if key in expected or key.startswith("critic")}
            assert found == expected
            assert made.critic.optim.lr == 1e-5 and small.config(made).critic.optim.lr == 3e-4
        checks.check(config(*given))
        with pytest.raises(OptionError, match=r"models\.small: critic\.shuffle=true draws the sequences of"):
            checks.check(config(*given, f"{critic}.shuffle=true"))

    def test_without_models_nothing_is_there(self) -> None:
        made = config()
        assert model_options.of(made) == [] and model_options.names(made) == ("policy",)
        assert checks.check(made) == []

    @pytest.mark.seconds
    @pytest.mark.parametrize(
        ("overrides", "message"),
        [
            (["+verl_ext.models.policy.trained=true"], r"models\.policy: a model's name is an identifier other than"),
            (
                ["+verl_ext.models.my-model.trained=true"],
                r"models\.my-model: a model's name is an identifier other than",
            ),
            (["+verl_ext.models.small=3"], r"models\.small is 3; give what differs"),
            (["+verl_ext.models.small.modl.path=x"], r"small\.modl is not a key of a model\. Did you mean 'model'"),
            (["+verl_ext.models.small.model.pth=x"], r"small\.model\.pth: verl's config has no such key\..*'path'"),
            (["+verl_ext.models.small.actor.optim.rl=1"], r"small\.actor\.optim\.rl: verl's config has no such key"),
            *(
                (
                    [f"+verl_ext.models.small.rollout.{key}=1"],
                    rf"rollout\.{key} cannot differ between models.*Set actor_",
                )
                for key in model_options.SHARED
            ),
            (
                ["distillation.enabled=true"],
                r"does not go with distillation\.enabled=true: .*or leave out verl_ext\.mod",
            ),
            (
                ["reward.reward_model.enable=true"],
                r"reward_model\.enable=true without enable_resource_pool: .*tokenizer",
            ),
            (
                ["actor_rollout_ref.rollout.disaggregation.enabled=true"],
                r"does not go with actor_rollout_ref\.rollout\.disaggregation\.enabled=true; or leave out",
            ),
            (["+verl_ext.models.small.trained=1"], r"small\.trained is 1; give true or false"),
            (["+verl_ext.models.small.updates_per_batch=0"], r"updates_per_batch is 0; give a whole number"),
            (["+verl_ext.models.small.pool.nnodes=1"], r"small\.pool is .*give \{n_gpus_per_node"),
            (
                ["+verl_ext.models.small.adapter_of=policy"],
                r"adapter_of is not supported: verl 0\.9\.1 has one adapter",
            ),
            (
                ["+verl_ext.models.far.endpoint.url=http://x/v1", "+verl_ext.models.far.endpoint.model=y"],
                r"models\.far: no agent of the orchestra solver_verifier asks",
            ),
            (
                [
                    "+verl_ext.models.far.endpoint.url=http://x/v1",
                    "+verl_ext.models.far.endpoint.model=y",
                    "+verl_ext.models.far.trained=true",
                ],
                r"models\.far\.trained: a model with an endpoint is not served here; leave it out",
            ),
            (
                [
                    "+verl_ext.models.far.endpoint.url=http://x/v1",
                    "+verl_ext.models.far.endpoint.model=y",
                    "+verl_ext.models.far.endpoint.api_key_env=VERL_EXT_NO_SUCH_KEY",
                ],
                r"endpoint\.api_key_env: the environment variable VERL_EXT_NO_SUCH_KEY is empty or not set",
            ),
            (["+verl_ext.models.small.rollout.name=vllm"], r"small\.rollout\.name=vllm: all models of a run have one"),
            (["actor_rollout_ref.rollout.name=trtllm"], r"rollout\.name=trtllm.*Choose one of embedded, vllm, sglang"),
            (
                [SEPARATE, "+verl_ext.models.small.trained=false"],
                r"small\.trained=false with trainer\.v1\.trainer_mode=separate_async.*small\.pool\.n_gpus_per_node=1",
            ),
            (
                [SEPARATE, "+verl_ext.models.small.actor.ppo_mini_batch_size=2"],
                r"small\.actor\.ppo_mini_batch_size=2 with .*separate_async.*set verl_ext\.models\.small\.updates_per",
            ),
            *(
                (
                    [*SERVERS, f"{key}={value}"],
                    rf"{where}actor_rollout_ref\.model\.{key.split('model.')[1]}={value} with .*{SEPARATE}: .*"
                    r"without the adapter.* Set actor_rollout_ref\.model\.lora\.merge=true",
                )
                for key, value, where in (
                    ("actor_rollout_ref.model.lora_rank", 8, "^"),
                    ("actor_rollout_ref.model.lora.rank", 8, "^"),
                    ("actor_rollout_ref.model.lora_adapter_path", "x", "^"),
                    ("+verl_ext.models.small.model.lora_rank", 8, r"models\.small: "),
                )
            ),
            (
                [SEPARATE],
                r"small\.rollout\.nnodes is 0 with .*separate_async.*actor_rollout_ref\.rollout\.nnodes, to at",
            ),
            (
                ["+recipe=[dr_mas,dvp,cpu]", "+verl_ext.models.small.trained=false"],
                r"dvp needs the safe set of every turn.*small\.actor\.optim\.lr=0 instead of it, or leave out dvp",
            ),
            (
                ["actor_rollout_ref.actor.checkpoint.async_save=true"],
                r"^actor_rollout_ref\.actor\.checkpoint\.async_save=true with verl_ext\.models: .*Set it to false",
            ),
            (
                ["+verl_ext.models.small.actor.checkpoint.async_save=true"],
                r"^verl_ext\.models\.small\.actor\.checkpoint\.async_save=true with",
            ),
            (
                ["critic.enable=true", "critic.checkpoint.async_save=true"],
                r"^critic\.checkpoint\.async_save=true with verl_ext\.models",
            ),
            (["verl_ext.loss_scale=each"], r"loss_scale is 'each'; choose own or joint"),
            (["verl_ext.loss_scale=joint"], r"loss_agg_mode=token-mean.*loss_agg_mode=token-sum"),
            (["+verl_ext.models.other.trained=true"], r"models\.other: no agent of the orchestra solver_verifier asks"),
            (["+verl_ext.orchestra.agents.solver.model=big"], r"asks for the model 'big'; this run has policy, small"),
            (
                ["+verl_ext.models.small.model.path=x", "trainer.rollout_data_dir=y"],
                r"small\.model\.path with trainer\.rollout_data_dir.*verl_ext\.rollouts_dir",
            ),
            (
                ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive"],
                r"kl_ctrl\.type=adaptive.*Set it to fixed",
            ),
            (
                ["critic.enable=true", "+verl_ext.models.small.trained=false"],
                r"a critic .*needs the value of every turn.*small\.actor\.optim\.lr=0 instead of it, or leave out a cr",
            ),
            (
                ["+verl_ext.models.small.critic.model.path=x"],
                r"small\.critic: this run has no critic.*critic\.enable=true",
            ),
            (
                ["critic.enable=true", "+verl_ext.models.small.critic.enable=false"],
                r"small\.critic\.enable cannot differ between models.*Set critic\.enable",
            ),
            (
                ["critic.enable=true", "+verl_ext.models.small.critic.optim.rl=1"],
                r"small\.critic\.optim\.rl: verl's config has no such key",
            ),
            (
                [
                    "critic.enable=true",
                    "verl_ext.loss_scale=joint",
                    "actor_rollout_ref.actor.loss_agg_mode=token-sum",
                    "critic.loss_agg_mode=token-mean",
                ],
                r"joint with critic\.loss_agg_mode=token-mean.*Set critic\.loss_agg_mode=token-sum",
            ),
            (
                [
                    "critic.enable=true",
                    "verl_ext.loss_scale=joint",
                    "actor_rollout_ref.actor.loss_agg_mode=token-sum",
                    "+verl_ext.models.small.critic.loss_agg_mode=token-mean",
                ],
                r"joint: verl_ext\.models\.small\.critic\.loss_agg_mode is token-mean; leave it out",
            ),
            (
                ["+verl_ext.models.small.updates_per_batch=1000000"],
                r"models\.small: verl_ext\.updates_per_batch is 1000000",
            ),
            (
                ["+recipe=[dr_mas,kpo,cpu]", "+verl_ext.models.small.actor.policy_loss.kalman_q=-1"],
                r"small: .*kalman_q",
            ),
            (
                ["+recipe=[otb,cpu]", "+verl_ext.models.small.model.use_fused_kernels=true"],
                r"models\.small: otb needs the logits, which fused kernels never form",
            ),
            (
                ["+recipe=[otb,cpu]", "+verl_ext.models.small.trained=false"],
                r"otb needs sum_pi_squared .*models\.small\.trained=false has none\. Set .*small\.actor\.optim\.lr=0",
            ),
            (
                ["+verl_ext.models.small.trained=false", "+algorithm.modifiers.empg=true"],
                r"empg needs the entropy of every turn, which a training engine computes",
            ),
            (
                ["+verl_ext.models.small.trained=false", "+verl_ext.models.small.model.lora_adapter_path=x"],
                r"small\.trained=false with model\.lora_adapter_path: .*small\.model\.lora_adapter_path=null",
            ),
            (
                ["+verl_ext.models.small.trained=false", "actor_rollout_ref.rollout.calculate_log_probs=false"],
                r"small\.trained=false: its turns .*Set actor_rollout_ref\.rollout\.calculate_log_probs=true",
            ),
            *(
                (
                    [
                        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
                        "trainer.n_gpus_per_node=2",
                        f"+verl_ext.models.small.trained={trained}",
                        "+verl_ext.models.small.pool.n_gpus_per_node=1",
                    ],
                    r"small: the 1 GPUs of verl_ext\.models\.small\.pool\.n_gpus_per_node and nnodes cannot be divided "
                    r"into servers of 2 .*Set verl_ext\.models\.small\.rollout\.tensor_model_parallel_size",
                )
                for trained in ("false", "true")
            ),
            (
                [
                    SEPARATE,
                    "actor_rollout_ref.rollout.nnodes=1",
                    "actor_rollout_ref.rollout.n_gpus_per_node=3",
                    "trainer.n_gpus_per_node=2",
                    "+verl_ext.models.small.rollout.data_parallel_size=2",
                ],
                r"small: the 3 GPUs of verl_ext\.models\.small\.rollout\.n_gpus_per_node and nnodes .*servers of 2 ",
            ),
        ],
    )
    def test_what_cannot_be_is_named_before_ray_starts(self, overrides: list[str], message: str) -> None:
        run = [one for one in RUN if not (one.startswith("+recipe") and overrides[0].startswith("+recipe"))]
        given = {one.split("=")[0] for one in overrides}
        kept = [one for one in (*run, *TWO) if one.split("=")[0] not in given and one.split("=")[0] + ".x" not in given]
        kept = [one for one in kept if overrides != ["+verl_ext.models.small=3"] or ".small." not in one]
        composed = compose(
            "ppo_trainer", overrides=[*kept, *(one.replace("verl_ext.loss", "+verl_ext.loss") for one in overrides)]
        )
        with pytest.raises(OptionError, match=message):
            checks.complete(composed)
            checks.check(composed)

    def test_rows_of_an_agent_loop_without_models_are_refused(self, tmp_path: Path) -> None:
        files = []
        for name in ("single_turn_agent", "verl_ext_orchestra"):
            files.append(str(tmp_path / f"{name}.parquet"))
            pandas.DataFrame({"agent_name": [name]}).to_parquet(files[-1])
        loop = "actor_rollout_ref.rollout.agent.default_agent_loop=single_turn_agent"
        data = [f"data.{which}_files=[{files[0]}]" for which in ("train", "val")]
        message = "does not go with .*default_agent_loop=single_turn_agent: only agents.*Set it to verl_ext_orchestra"
        with pytest.raises(OptionError, match=message):
            checks.check(config(*TWO, loop, *data))
        checks.check(config(*TWO, loop, f"data.train_files={files[1]}", data[1]))

    def test_an_adapter_goes_to_servers_apart_from_training_where_it_is_merged(self) -> None:
        adapter = "actor_rollout_ref.model.lora_rank=8"
        checks.check(config(*TWO, *SERVERS, adapter, "actor_rollout_ref.model.lora.merge=true"))
        checks.check(config(*TWO, "trainer.v1.trainer_mode=colocate_async", adapter))

    def test_a_model_has_a_filter_of_its_own(self) -> None:
        made = config(*TWO, "+recipe=[dr_mas,kpo,cpu]", "+verl_ext.models.small.actor.policy_loss.kalman_q=1e-3")
        checks.check(made)
        (small,) = model_options.of(made)
        own = small.config(made).actor_rollout_ref.actor.policy_loss
        assert (own.loss_mode, own.kalman_q, own.kalman_r) == ("kpo", 1e-3, 1.0)
        assert made.actor_rollout_ref.actor.policy_loss.kalman_q == 1e-6

    @pytest.mark.parametrize("without", ["model.use_fused_kernels=true", "actor.strategy=torchtitan", "trained=false"])
    def test_a_record_has_no_column_that_one_model_lacks(self, without: str) -> None:
        """The rows of the others had it and the first advantage stopped the run for want of it."""
        record = "verl_ext.record_dir=records"
        assert "sum_pi_squared" in engine_columns(config(*TWO, record))
        assert engine_columns(config(TWO[1], record, f"+verl_ext.models.small.{without}")) == set()

    def test_verl_may_decode_the_rows_of_models_with_one_tokenizer(self) -> None:
        given = [*TWO, "+verl_ext.models.small.model.path=/models/small", "trainer.validation_data_dir=y"]
        with pytest.raises(OptionError, match=r"or set actor_rollout_ref\.model\.tokenizer_path, if all models have"):
            checks.check(config(*given))
        checks.check(config(*given, "actor_rollout_ref.model.tokenizer_path=/models/large"))
        with pytest.raises(OptionError, match=r"small\.model\.tokenizer_path with trainer\.validation_data_dir"):
            checks.check(config(*given[:2], "+verl_ext.models.small.model.tokenizer_path=z", given[-1]))

    @pytest.mark.parametrize("backend", ["nccl", "delta_sharded"])
    def test_each_model_sends_its_weights_in_a_group_of_its_own(self, backend: str) -> None:
        """Ray keeps the id of a NCCL group under its name: a second model would find that of the first."""
        engine = "actor_rollout_ref.rollout.checkpoint_engine"
        models = [*TWO, "+verl_ext.models.other.trained=true", "+verl_ext.orchestra.agents.solver.model=other"]
        name = f"engine_kwargs.{backend}.group_name"

        def groups(*more: str) -> list[str | None]:
            made = config(*models, f"{engine}.backend={backend}", *more)
            every = [made, *(model.config(made) for model in model_options.of(made))]
            return [OmegaConf.select(one, f"{engine}.{name}") for one in every]

        assert groups() == [None, "verl_ext_small", "verl_ext_other"]
        assert groups(f"+{engine}.{name}=mine") == ["mine", "verl_ext_small", "verl_ext_other"]
        own = f"+verl_ext.models.small.rollout.checkpoint_engine.{name}=its_own"
        assert groups(own) == [None, "its_own", "verl_ext_other"]
        made = config(*models, f"{engine}.backend=naive")
        assert all(model.config(made).actor_rollout_ref == made.actor_rollout_ref for model in model_options.of(made))

    def test_verls_transfer_by_nccl_takes_the_name_of_its_group(self) -> None:
        """Without its imports, of which cupy needs a GPU."""
        source = Path(verl.__file__).parent / "checkpoint_engine" / "nccl_checkpoint_engine.py"
        tree = ast.parse(source.read_text())
        (engine,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "NCCLCheckpointEngine")
        (init,) = (n for n in engine.body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
        assert "group_name" in {one.arg for one in init.args.args}

    def test_prometheus_reads_one_model_and_a_warning_says_so(self) -> None:
        on = "actor_rollout_ref.rollout.prometheus.enable=true"
        assert any("Prometheus reads the last model alone" in one for one in checks.check(config(*TWO, on)))
        assert not any("Prometheus" in one for one in checks.check(config(on)))

    def test_too_few_gpus_for_all_pools_are_named_before_a_model_is_loaded(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pool = "+verl_ext.models.small.pool.n_gpus_per_node=4"
        verls = {"global_pool": [2, 2], "reward_pool": [1]}
        monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 8.0, "GPU": 8.0})
        lead.require_gpus(config(*TWO), {"global_pool": [16]})  # verl's to refuse
        lead.require_gpus(config(*TWO, pool), {"global_pool": [2, 2]})
        message = r"asks for 9 GPUs, .*cluster has 8: trainer 4, reward_pool 1, verl_ext\.models\.small\.pool 4\. Set"
        with pytest.raises(OptionError, match=message):
            lead.require_gpus(config(*TWO, pool), verls)
        servers = ["actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=2"]
        message = (
            r"asks for 9 .*trainer 4, reward_pool 1, actor_rollout_ref\.rollout 2, verl_ext\.models\.small\.rollout 2"
        )
        with pytest.raises(OptionError, match=message):
            lead.require_gpus(config(*TWO, SEPARATE, *servers), verls)

    def test_updates_by_rows_are_warned_about(self) -> None:
        made = config(*TWO, "verl_ext.updates_per_batch=null")
        assert any("verl_ext.updates_per_batch=null a model with few sequences" in one for one in checks.check(made))

    def test_servers_that_do_not_fit_on_one_gpu_are_warned_about(self) -> None:
        given = [*TWO, "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.gpu_memory_utilization=0.5"]
        fits = "rollout.gpu_memory_utilization adds up to"
        assert any(f"{fits} 1 of each GPU, over 0.9" in one for one in checks.check(config(*given)))
        for less in ("rollout.gpu_memory_utilization=0.4", "pool.n_gpus_per_node=1"):
            assert not any(fits in one for one in checks.check(config(*given, f"+verl_ext.models.small.{less}")))

    @pytest.mark.seconds
    def test_a_resume_with_other_models_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
        place = f"trainer.default_local_dir={tmp_path}"
        actor = tmp_path / "global_step_4" / "actor"
        actor.mkdir(parents=True)
        checks.check(config(place))
        with pytest.raises(OptionError, match="holds one model, but this run trains policy, small"):
            checks.check(config(place, *TWO))
        for name in ("policy", "small"):
            (actor / name).mkdir()
        checks.check(config(place, *TWO))
        frozen = ["+verl_ext.models.small.trained=false", TWO[1]]
        for given, trains in (((), "policy"), (frozen, "policy")):
            with pytest.raises(OptionError, match=f"holds the models policy, small, but this run trains {trains}"):
                checks.check(config(place, *given))
        checks.check(config(place, "trainer.resume_mode=disable"))

    @pytest.mark.seconds
    def test_the_plan_is_made_of_the_configs_alone(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        shape = LlamaConfig(
            vocab_size=97,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        shape.save_pretrained(tmp_path)
        count = sum(one.numel() for one in LlamaForCausalLM(shape).parameters())
        given = [
            *RUN,
            f"actor_rollout_ref.model.path={tmp_path}",
            "+verl_ext.models.small.model.lora_rank=2",
            "+verl_ext.models.judge.pool.n_gpus_per_node=2",
            "+verl_ext.models.judge.actor.use_kl_loss=true",
            "+verl_ext.models.frozen.trained=false",
        ]
        policy, small, judge, frozen = command.plan(compose("ppo_trainer", overrides=given))
        assert [one.name for one in (policy, small, judge, frozen)] == ["policy", "small", "judge", "frozen"]
        assert [one.gpus for one in (policy, small, judge)] == [1, 1, 2] and judge.pool == "pool_judge"
        assert (policy.weights, policy.gradients, policy.optimiser) == (4 * count, 4 * count, 8 * count)
        assert 0 < small.trainable < count // 2 and small.optimiser == 8 * small.trainable
        assert (judge.trainable, judge.weights) == (count, 4 * 2 * count / 2), "two copies on two GPUs"
        assert (frozen.trainable, frozen.training) == (0, 0) and frozen.engine == policy.engine
        assert frozen.kv_per_1000 == policy.kv_per_1000
        assert policy.engine == 4 * count and policy.kv_per_1000 == 1000 * 2 * 3 * 2 * 4 * 4
        given = [*given[:-1], "critic.enable=true", f"critic.model.path={tmp_path}"]
        valued = command.plan(compose("ppo_trainer", overrides=given))
        for one, alone in zip(valued, (policy, small, judge), strict=True):
            assert one.weights - alone.weights == one.gradients - alone.gradients == 4 * count / one.gpus
            assert one.optimiser - alone.optimiser == 8 * count / one.gpus
        shown = command.text([policy, small, judge, frozen])
        assert "pool run: 1 GPU(s), 2 training process(es) a GPU and 3 engine(s)" in shown
        assert "in all: 3 GPU(s)" in shown and "rollout servers" not in shown
        servers = "actor_rollout_ref.rollout.nnodes=2 actor_rollout_ref.rollout.n_gpus_per_node=3".split()
        of_small = "+verl_ext.models.small.rollout.n_gpus_per_node=4"
        of_frozen = "+verl_ext.models.frozen={trained: false, pool: {n_gpus_per_node: 1}}"
        given = [*given[:-2], SEPARATE, *servers, of_small, of_frozen]
        apart = command.plan(compose("ppo_trainer", overrides=given))
        assert [(one.gpus, one.rollout_gpus) for one in apart] == [(1, 6), (1, 8), (2, 6), (1, None)]
        shown = command.text(apart)
        assert "rollout servers of small: 8 GPU(s) that only they use" in shown and "in all: 24 GPU(s)" in shown
        assert shown.count("while agents play here too") == 2 and shown.count("while agents play:") == 1
        GlobalHydra.instance().clear()  # the command composes by itself
        assert cli.main(["plan-models", "+verl_ext.models.small.modl=1"]) == 1
        assert "small.modl is not a key of a model" in capsys.readouterr().err


# ---- whose rows they are --------------------------------------------------------------------------------------------


def put(store: Any, models: list[str | None], masks: list[list[int]]) -> KVBatchMeta:
    from verl.utils.tensordict_utils import get_tensordict

    keys = [f"u{row}_0_0" for row in range(len(models))]
    fields = get_tensordict(
        {
            "extra_fields": [
                {} if model is None else {"model": model, "agent_id": f"a{row % 2}"} for row, model in enumerate(models)
            ],
            "loss_mask": torch.nested.as_nested_tensor([torch.tensor(mask) for mask in masks], layout=torch.jagged),
        }
    )
    tags = [{"seq_len": 3 + len(mask)} for mask in masks]
    return store.kv_batch_put(keys=keys, partition_id="train", fields=fields, tags=tags) and KVBatchMeta(
        keys=keys, tags=tags, partition_id="train", extra_info={"temperature": 1.0}
    )


class Plain:
    """What stands in verl's place: says what it was asked to do with which rows."""

    use_reference_policy = False

    def __init__(self, name: str, pool: Any = None, trained: bool = True) -> None:
        self.name, self.done = name, []
        self.model = model_options.Model(name, 1, pool=pool, trained=trained)
        self._updates_metrics: list[Any] = []
        self.meet: threading.Barrier | None = None

    def _do(self, what: str, batch: Any, metrics: dict[str, Any]) -> Any:
        self.done.append((what, list(batch.keys), dict(batch.extra_info)))
        if self.meet is not None:
            self.meet.wait(timeout=300)
        metrics["actor/grad_norm"] = float(len(batch))
        metrics["actor/agent_gradient/0/mean"] = 5.0
        return batch

    def _balance_batch(self, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        return self._do("balance", batch, metrics)

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        return self._do("old", batch, metrics)

    def _compute_ref_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        return self._do("ref", batch, metrics)

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        return self._do("update", batch, metrics)


class Member(ModelSide, Plain):
    """A further model."""


class Lead(lead.LeadMixin, Plain):
    """The run."""


def team(**further: Member) -> Lead:
    made = Lead("policy")
    made._members = further
    return made


@pytest.mark.seconds
def test_each_model_gets_its_own_rows_and_names_its_own_metrics(store: Any) -> None:
    small, idle, frozen = Member("small"), Member("idle"), Member("frozen", trained=False)
    run = team(small=small, idle=idle, frozen=frozen)
    batch = put(store, [None, "small", "policy", "frozen", "small"], [[1], [1, 1], [1], [1], [1]])
    batch = run._balance_batch(batch, {})
    assert batch.keys == ["u0_0_0", "u2_0_0", "u1_0_0", "u4_0_0", "u3_0_0"], "the rows of a model stay together"
    assert batch.extra_info == {"temperature": 1.0}
    reported = {name: value for _, metrics in run._updates_metrics for name, value in metrics.items()}
    assert [reported[f"model/{name}/sequences"] for name in ("policy", "small", "idle", "frozen")] == [2, 2, 0, 1]
    assert reported["model/small/tokens"] == 9
    assert {name: rows for name, rows in reported.items() if "/agent/" in name} == {
        "model/small/agent/a1/sequences": 1,
        "model/policy/agent/a0/sequences": 1,
        "model/frozen/agent/a1/sequences": 1,
        "model/small/agent/a0/sequences": 1,
    }
    run._updates_metrics.clear()

    batch.extra_info["told"] = True
    scored = run._compute_old_log_prob(batch, {})
    assert scored.keys == batch.keys and scored.extra_info == {}, "as verl: later passes are told nothing of this one"
    metrics: dict[str, Any] = {}
    run._update_actor(scored, metrics)
    reported = {name: value for _, own in run._updates_metrics for name, value in own.items()}
    assert {name for name in reported if name.endswith("grad_norm")} == {
        "actor/policy/grad_norm",
        "actor/small/grad_norm",
        "actor/frozen/grad_norm",
    }
    assert metrics == {"actor/agent_gradient/0/mean": 5.0}, "what a part of the run looks for keeps its name"
    assert idle.done == []
    assert [what for what, _, _ in frozen.done] == ["balance", "old"], "a frozen model is scored and not updated"
    assert [(what, keys) for what, keys, _ in small.done] == [
        (what, ["u1_0_0", "u4_0_0"]) for what in ("balance", "old", "update")
    ]
    assert small.done[1][2] == {"temperature": 1.0, "told": True}


def test_a_model_without_a_token_to_train_on_is_scored_and_not_updated(store: Any) -> None:
    small = Member("small")
    run = team(small=small)
    batch = run._balance_batch(put(store, ["policy", "small"], [[1], [0, 0]]), {})
    run._update_actor(run._compute_old_log_prob(batch, {}), {})
    assert [what for what, _, _ in small.done] == ["balance", "old"]
    assert [what for what, _, _ in run.done] == ["balance", "old", "update"]
    with pytest.raises(BatchError, match="of the model 'other'; this run has policy, small"):
        run._balance_batch(put(store, ["other"], [[1]]), {})


def test_a_mean_over_no_token_is_left_out_and_a_nan_of_an_update_stays(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One mini-batch in which a model had no token made its value of the whole step NaN."""

    def do(self: Plain, what: str, batch: Any, metrics: dict[str, Any]) -> Any:
        tokens = store.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=["loss_mask"])["loss_mask"]
        metrics["actor/entropy"] = float(tokens.values().float().sum() or "nan")
        metrics["actor/grad_norm"] = float("nan") if what == "update" else 1.0
        return batch

    monkeypatch.setattr(Plain, "_do", do)
    run = team(small=Member("small"))
    for mask in ([1, 1, 1], [0, 0]):
        batch = run._balance_batch(put(store, ["policy", "small"], [[1], mask]), {})
        run._compute_old_log_prob(batch, {})
    found = reduction.reduced(run._updates_metrics)
    assert found["actor/small/entropy"] == 3.0 and found["actor/policy/entropy"] == 1.0
    assert found["model/small/sequences"] == 2
    run._update_actor(batch, {})
    assert math.isnan(reduction.reduced(run._updates_metrics)["actor/policy/grad_norm"])


def test_rows_without_a_token_are_known_before_they_are_dealt(store: Any) -> None:
    batch = put(store, ["policy"] * 3, [[0], [1, 1], [0, 1]])
    Columns(OmegaConf.create({"algorithm": {"adv_estimator": "grpo"}})).on_sample(batch)
    assert [has_token(tag) for tag in batch.tags] == [False, True, True]
    assert all(is_trained(tag) for tag in batch.tags), "it counts as a row"


def test_the_rows_of_an_update_are_those_of_models_that_are_updated(store: Any) -> None:
    run = team(small=Member("small"), frozen=Member("frozen", trained=False))
    batch = put(store, ["policy", "frozen", "small", "policy"], [[0, 0], [1], [0, 1], [0]])
    assert run._balance_batch(batch, {}) and run.updated_rows(batch) == {"u2_0_0"}
    alone = Lead("policy")
    assert alone.updated_rows(batch) == set(batch.keys)


def test_a_reference_is_asked_where_there_is_one(store: Any) -> None:
    small = Member("small")
    small.use_reference_policy = True
    run = team(small=small)
    batch = run._balance_batch(put(store, ["policy", "small"], [[1], [1]]), {})
    run._compute_ref_log_prob(batch, {})
    assert [what for what, _, _ in small.done] == ["balance", "ref"] and [d[0] for d in run.done] == ["balance"]


class Apart(Plain):
    """verl's trainer of `separate_async`: servers of its own, and weights kept for later mini-batches."""

    local_trigger_step, parameter_sync_step = 0, 2

    def __init__(self, name: str, trained: bool = True) -> None:
        super().__init__(name, trained=trained)
        self.said: list[Any] = []
        self.actor_rollout_wg = SimpleNamespace(save_model_to_cpu=lambda n: self.said.append(("keep", n)))

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        self.said.append(("score", self.local_trigger_step))
        return batch

    def add_replicas_to_balancer(self) -> None:
        self.said.append("add")

    def remove_replicas_from_balancer(self) -> None:
        self.said.append("remove")

    def clear_sticky_cache(self) -> dict[str, str]:
        self.said.append("clear")
        return {"of": self.name}


def test_with_servers_apart_each_model_keeps_weights_and_lends_servers_as_the_run_does(store: Any) -> None:
    class SeparateMember(ModelSide, Apart):
        pass

    class Separate(separate.SeparateLead, Apart):
        pass

    run = Separate("policy")
    run.config = OmegaConf.create({"algorithm": {}})
    small, seldom, frozen = SeparateMember("small"), SeparateMember("seldom"), SeparateMember("frozen", trained=False)
    run._members = {"small": small, "seldom": seldom, "frozen": frozen}
    steps = (["small", "small"], ["policy", "seldom"])
    for run.local_trigger_step, models in enumerate(steps):
        run._compute_old_log_prob(run._balance_batch(put(store, models, [[1], [1]]), {}), {})
    assert run.said == seldom.said == [("keep", 0), ("score", 1)], "not those of an earlier synchronisation"
    assert small.said == [("score", 0)] and frozen.said == []
    run.config = OmegaConf.create({"algorithm": {"rollout_correction": {"bypass_mode": True}}})
    for run.local_trigger_step, models in enumerate(steps):
        run._compute_old_log_prob(run._balance_batch(put(store, models, [[1], [1]]), {}), {})
    assert run.said[2:] == seldom.said[2:] == [("score", 1)], "without scores of the trainer no weights are kept"
    run.add_replicas_to_balancer()
    run.remove_replicas_from_balancer()
    assert run.clear_sticky_cache() == {"of": "policy"}
    for one in (run, small, seldom):
        assert one.said[-3:] == ["add", "remove", "clear"]
    assert frozen.said == []


def test_pools_work_at_the_same_time_and_models_of_one_pool_in_turn(store: Any) -> None:
    apart, beside = Member("apart", pool={"n_gpus_per_node": 1, "nnodes": 1}), Member("beside")
    run = team(apart=apart, beside=beside)
    batch = run._balance_batch(put(store, ["policy", "apart", "beside"], [[1], [1], [1]]), {})
    run.meet = apart.meet = threading.Barrier(2)  # neither goes on before the other has begun
    run._update_actor(batch, {})
    assert [[d[0] for d in one.done] for one in (run, apart, beside)] == [["balance", "update"]] * 3


# ---- names and numbers ----------------------------------------------------------------------------------------------


def test_servers_and_workers_of_a_model_have_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's own manager and replica, and our end of the weight sync: the number decides the server's name."""
    from verl.workers.rollout.base import get_rollout_class
    from verl.workers.rollout.llm_server import LLMServerManager
    from verl.workers.rollout.replica import RolloutReplica

    from verl_ext.cpu.engine.replica import EmbeddedReplica, server_name

    launched = []

    async def launch(self: Any) -> None:
        launched.append(self.replica_rank)

    monkeypatch.setattr(EmbeddedReplica, "launch_servers", launch)
    rollout = {"name": "embedded", "nnodes": 0, "disaggregation": {"enabled": False}}
    made = members.numbered_servers(LLMServerManager, 2 * members.STRIDE)(
        OmegaConf.create({"actor_rollout_ref": {"rollout": rollout, "model": {}}}), worker_group=object()
    )
    replica = made.rollout_replica_class.__new__(made.rollout_replica_class)
    replica.replica_rank, replica.world_size = 1, 2

    class Group:
        workers = ["a", "b", "c", "d"]

    import asyncio

    asyncio.run(RolloutReplica.init_hybrid(replica, Group()))
    assert replica.workers == ["c", "d"] and launched == [10081]

    class Config:
        tensor_model_parallel_size, data_parallel_size, pipeline_model_parallel_size = 2, 1, 1

    monkeypatch.setenv("RANK", "3")
    seen: dict[str, Any] = {}

    def original(rollout_name: str, mode: str) -> Any:
        assert issubclass(get_rollout_class(rollout_name, mode), object)
        return lambda config, **kwargs: seen.update(kwargs)

    members.numbered_rollout(original, 2 * members.STRIDE)("embedded", "async")(config=Config())
    assert seen["replica_rank"] == 10081 and server_name(10081) == "embedded_server_10081_0"

    rollout["nnodes"] = 1  # of separate_async: verl counts on from the two servers beside training
    node = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout, "model": {}}})
    apart = members.numbered_standalone(LLMServerManager, 2 * members.STRIDE)(config=node, start_rank=2)
    assert apart.start_rank == 10082


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [6, 8])
def test_sglangs_server_and_its_end_of_the_weight_sync_meet(gpus: int) -> None:
    """The last of verl's code before SGLang, for the second replica of each of three models."""
    boundary = str(Path(__file__).parent / "server_boundary.py")
    ranks = json.dumps([k * members.STRIDE + 1 for k in range(3)])
    done = copies.python(boundary, "sglang", "numbers", ranks, gpus, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert [one["server"] for one in found] == [f"sglang_server_{k * 5040 + 1}_0" for k in range(3)]
    assert all(one["looked_for"] == one["server"] for one in found)
    assert [one["first_gpu"] for one in found] == [1, 1, 1], "the GPUs of the first model's"


@pytest.mark.seconds
@pytest.mark.usefixtures("verl_configuration")
@pytest.mark.parametrize(("pool", "mode"), [(None, "colocate_async"), (2, "colocate_async"), (2, "separate_async")])
def test_a_model_that_is_not_trained_is_servers_alone(
    monkeypatch: pytest.MonkeyPatch, model: Path, pool: int | None, mode: str
) -> None:
    """verl's own manager and replicas, numbered as those of other models: in the run's pool or in one of their own."""
    from verl.trainer.ppo.v1 import PPOTrainerColocateAsync, PPOTrainerSeparateAsync
    from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerManager

    from verl_ext.cpu.engine.replica import EmbeddedReplica
    from verl_ext.integration.models import served

    said: list[Any] = []

    class Server:
        def __init__(self, replica: Any) -> None:
            self.number = replica.replica_rank

        def __getattr__(self, name: str) -> Any:
            async def remote(*args: Any) -> None:
                said.append((self.number, name, *args))

            return SimpleNamespace(remote=remote)

    async def start(self: Any, resource_pool: Any = "its own") -> None:
        said.append((self.replica_rank, resource_pool, self.config.load_format, self.config.max_num_seqs))
        self.servers, self._server_address = [Server(self)], str(self.replica_rank)

    async def no_balancer(self: Any) -> None:
        self.global_load_balancer = None

    monkeypatch.setattr(EmbeddedReplica, "init_colocated", start)
    monkeypatch.setattr(EmbeddedReplica, "init_standalone", start)
    monkeypatch.setattr(LLMServerManager, "_init_global_load_balancer", no_balancer)
    monkeypatch.setattr(served, "split_resource_pool", lambda of, size: [f"{of}/{size}/{n}" for n in range(4 // size)])
    made = config(
        TWO[1].replace("small", "frozen"),
        "+verl_ext.models.frozen.trained=false",
        "+verl_ext.models.frozen.rollout.max_num_seqs=5",
        "actor_rollout_ref.model.lora_rank=8",
        f"actor_rollout_ref.model.lora.merge={mode == 'separate_async'}",
        f"actor_rollout_ref.model.path={model}",
        "trainer.n_gpus_per_node=4",
        f"trainer.v1.trainer_mode={mode}",
        *([] if pool is None else [f"+verl_ext.models.frozen.pool.n_gpus_per_node={pool}"]),
        *([] if pool else ["actor_rollout_ref.rollout.tensor_model_parallel_size=2"]),
    )
    checks.check(made)
    pools = SimpleNamespace(resource_pool_dict={"global_pool": "run"})
    run = SimpleNamespace(config=made, resource_pool_manager=pools)
    (further,) = model_options.of(made)
    apart = mode == "separate_async"
    frozen = members.member(further, run, (PPOTrainerSeparateAsync if apart else PPOTrainerColocateAsync,))
    assert not isinstance(frozen, PPOTrainer) and not hasattr(frozen, "actor_rollout_wg")
    assert frozen.config.actor_rollout_ref.model.lora_rank == 0
    frozen._setup()
    numbers = (members.STRIDE, members.STRIDE + 1)
    places = [f"run/2/{n}" for n in range(2)] if pool is None else ["its own"] * 2
    assert said == [
        *((number, place, "auto", 5) for number, place in zip(numbers, places, strict=True)),
        *((number, "sleep") for number in numbers if not apart),
    ]
    assert frozen.tokenizer.eos_token == "w0"
    assert isinstance(frozen.get_llm_client(), FullyAsyncLLMServerClient), "the client of the run's mode"
    assert frozen._rollout_server_managers() == [frozen.llm_server_manager]
    assert frozen._get_n_gpus_for_throughput() == (pool or 0), "those of the run's pool are counted with it"
    said.clear()
    if apart:  # what is lent to rollouts and given back are servers beside training
        lead.Together({"frozen": frozen.checkpoint_manager}).abort_replicas()
        assert said == []
    manager = frozen.standalone_checkpoint_manager if apart else frozen.checkpoint_manager
    lead.Together({"frozen": manager}).update_weights(7)
    told: list[list[Any]] = [["set_global_steps", 7]] if apart else [["wake_up"], ["set_global_steps", 7]]
    assert said == [(number, *what) for what in told for number in numbers], "none is woken that does not sleep"


class Saved:
    """A worker group whose checkpoint is a file with the step, kept and removed as verl's worker does."""

    def __init__(self) -> None:
        self.step, self.loaded, self.dies = 0, -1, False
        self.manager = object.__new__(BaseCheckpointManager)
        self.manager.previous_saved_paths = []

    def save_checkpoint(self, local_path: str, hdfs_path: Any, global_step: int, max_ckpt_to_keep: Any = None) -> None:
        if self.dies:
            raise KeyboardInterrupt
        self.manager.ensure_checkpoint_capacity(max_ckpt_to_keep)
        Path(local_path).mkdir(parents=True)
        (Path(local_path) / "step").write_text(str(global_step))
        self.manager.register_checkpoint(local_path, max_ckpt_to_keep)

    def load_checkpoint(self, local_path: str, del_local_after_load: bool = False) -> None:
        self.loaded = int((Path(local_path) / "step").read_text())


@pytest.mark.seconds
@pytest.mark.usefixtures("verl_configuration")
@pytest.mark.parametrize("keep", [None, 1, 2, 3])
@pytest.mark.parametrize("survivor", ["policy", "small"])
@pytest.mark.parametrize("kind", ["actor", "critic"])
def test_a_kill_between_the_saves_of_two_models_resumes_all_from_the_step_before(
    tmp_path: Path, kind: str, survivor: str, keep: int | None
) -> None:
    """verl's own saving and loading, by which one model has a step that the other has not."""
    kept = [f"trainer.max_{name}_ckpt_to_keep={keep or 'null'}" for name in ("actor", "critic")]
    overrides = (*TWO, f"trainer.default_local_dir={tmp_path}", *kept)

    class Run(lead.LeadMixin, PPOTrainer):
        def __init__(self) -> None:
            self.config, self.use_critic, self.trainer_mode = config(*overrides), True, "sync"
            self.train_dataloader = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)
            self.checkpoint_callback = SimpleNamespace(on_save=lambda **said: None)
            self.actor_rollout_wg, self.critic_wg = Saved(), Saved()
            (model,) = model_options.of(self.config)
            small = SimpleNamespace(model=model, actor_rollout_wg=Saved(), critic_wg=Saved())
            self._members = {"small": small}
            self.groups = {
                f"{kind}/{name}": getattr(one, f"{group}_wg")
                for kind, group in (("actor", "actor_rollout"), ("critic", "critic"))
                for name, one in (("policy", self), ("small", small))
            }

    Run.__abstractmethods__ = frozenset()
    run = Run()
    if survivor == "small":  # in whatever order they are saved
        run._trainers = lambda: {"small": run._members["small"], "policy": run}
    for run.global_steps in (1, 2, 3):
        run._save_checkpoint()
    (dies,) = {f"{kind}/policy", f"{kind}/small"} - {f"{kind}/{survivor}"}
    run.groups[dies].dies = True
    run.global_steps = 4
    with pytest.raises(KeyboardInterrupt):
        run._save_checkpoint()
    assert (tmp_path / "global_step_4" / kind / survivor / "step").exists()

    again = Run()
    again._load_checkpoint()
    assert again.global_steps == 3
    assert [group.loaded for group in again.groups.values()] == [3] * 4


@pytest.mark.seconds
def test_all_models_are_saved_and_synchronised_together(tmp_path: Path) -> None:
    calls: list[Any] = []

    class Group:
        def __init__(self, name: str) -> None:
            self.name = name

        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            calls.append((self.name, args, kwargs))

        load_checkpoint = save_checkpoint

        def update_weights(self, step: int) -> dict[str, int]:
            calls.append((self.name, step))
            return {"checkpoint_engine/flushes": step}

    groups = lead.Groups({name: Group(name) for name in ("policy", "small")})
    groups.save_checkpoint("here/actor", "there/actor", 3, max_ckpt_to_keep=2)
    groups.load_checkpoint(local_path="here/actor", del_local_after_load=False)
    together = lead.Together({name: Group(name) for name in ("policy", "small")})
    assert together.update_weights(7) == {f"checkpoint_engine/{name}/flushes": 7 for name in ("policy", "small")}
    assert calls == [
        *(
            (name, (f"here/actor/{name}", f"there/actor/{name}", 3), {"max_ckpt_to_keep": 2})
            for name in ("policy", "small")
        ),
        *((name, (f"here/actor/{name}",), {"del_local_after_load": False}) for name in ("policy", "small")),
        ("policy", 7),
        ("small", 7),
    ]
