# SPDX-License-Identifier: Apache-2.0
"""What is filled in, found and refused for SGLang on the CPU, without SGLang."""

from __future__ import annotations

import copy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from test_vllm_cpu import install, run_config, save_model
from transformers import Gemma2Config

from verl_ext.cpu.platform import hooks, servers, settings, sglang_cpu, sglang_cpu_process
from verl_ext.cpu.platform.fork_worker import IMPORTS
from verl_ext.integration.compat import wraps


@pytest.fixture
def sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "sglang", "0.5.12")
    monkeypatch.syspath_prepend(str(tmp_path))


def sglang_config(model: Path, **rollout: Any) -> Any:
    return run_config(
        model, **{"name": "sglang", "engine_kwargs": {"sglang": {}}, "free_cache_engine": True, **rollout}
    )


def test_run_on_sglang_is_completed(sglang: None, tmp_path: Path) -> None:
    config = sglang_config(save_model(tmp_path / "model"))
    settings.complete(config)
    assert config.actor_rollout_ref.rollout.engine_kwargs.sglang == {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "enable_memory_saver": False,
        "disable_cuda_graph": True,
        "grammar_backend": "none",
        "disable_overlap_schedule": True,
        "sleep_on_idle": True,
        "max_total_tokens": 128 * 16,  # of 16 sequences, as vLLM's
    }
    assert config.actor_rollout_ref.rollout.free_cache_engine is False
    assert config.verl_ext.env == {
        "SGLANG_USE_CPU_ENGINE": "1",
        "VERL_EXT_FORK_IMPORTS": f"{IMPORTS},verl.workers.rollout.sglang_rollout.async_sglang_server",
    }


def test_what_the_user_says_stays(sglang: None, tmp_path: Path) -> None:
    given = {"max_total_tokens": 999, "disable_overlap_schedule": False}
    config = sglang_config(save_model(tmp_path / "model"), engine_kwargs={"sglang": dict(given)})
    settings.complete(config)
    found = config.actor_rollout_ref.rollout.engine_kwargs.sglang
    assert {key: found[key] for key in given} == given
    assert found.device == "cpu"


def test_a_reward_model_is_served_alike(sglang: None, tmp_path: Path) -> None:
    config = sglang_config(save_model(tmp_path / "model"))
    rollout = {"name": "sglang", "prompt_length": 256, "response_length": 256, "engine_kwargs": {}}
    config.reward.reward_model = {"enable": True, "model_path": str(save_model(tmp_path / "judge")), "rollout": rollout}
    OmegaConf.set_struct(config, True)
    settings.complete(config)
    judge, policy = config.reward.reward_model.rollout, config.actor_rollout_ref.rollout
    assert judge.engine_kwargs.sglang == policy.engine_kwargs.sglang and judge.free_cache_engine is False
    assert policy.engine_kwargs.sglang.max_total_tokens == 512 * 16  # both have room for the longer conversations
    shutil.rmtree(tmp_path / "judge")
    Gemma2Config(vocab_size=256).save_pretrained(tmp_path / "judge")
    with pytest.raises(sglang_cpu.SglangCpuError, match="judge is a gemma2"):
        settings.complete(config)


def test_separate_servers_get_their_weights_over_gloo(sglang: None, tmp_path: Path) -> None:
    config = sglang_config(
        save_model(tmp_path / "model"), checkpoint_engine={"backend": "naive"}, n_gpus_per_node=1, nnodes=1
    )
    OmegaConf.update(config, "trainer.v1.trainer_mode", "separate_async", force_add=True)
    settings.complete(config)
    assert config.actor_rollout_ref.rollout.checkpoint_engine.backend == "gloo"
    assert config.ray_kwargs.ray_init.num_gpus == 2 + 1


def test_other_engines_are_left_alone(tmp_path: Path) -> None:
    """Also where no SGLang is installed and the model does not exist."""
    config = run_config(tmp_path / "nowhere", name="embedded")
    before = copy.deepcopy(config)
    sglang_cpu.complete(config)
    assert config == before


@pytest.mark.parametrize(
    "version, message",
    [(None, "needs sglang>=0.5.12.*make venv-sglang.*embedded"), ("0.4.9", "sglang 0.4.9 is installed")],
)
def test_version_is_refused(version: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if version:
        install(tmp_path, "sglang", version)
        monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(sglang_cpu.SglangCpuError, match=message):
        sglang_cpu.complete(sglang_config(tmp_path / "model"))


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("rollout.engine_kwargs.sglang.device", "cuda", r"rollout\.engine_kwargs\.sglang\.device=cuda: .*it is cpu"),
        ("rollout.engine_kwargs.sglang.attention_backend", "triton", "attention_backend=triton: .*torch_native"),
        ("rollout.engine_kwargs.sglang.enable_memory_saver", True, "enable_memory_saver=True"),
        ("rollout.tensor_model_parallel_size", 2, r"rollout\.tensor_model_parallel_size=2: .*n_gpus_per_node"),
        ("rollout.quantization", "fp8", r"rollout\.quantization=fp8"),
        ("rollout.mtp", {"enable": True, "enable_rollout": True}, r"rollout\.mtp\.enable_rollout=True"),
        ("rollout.disaggregation", {"enabled": True}, r"rollout\.disaggregation\.enabled=True"),
        ("rollout.enable_rollout_routing_replay", True, r"rollout\.enable_rollout_routing_replay=True"),
        ("model.lora_rank", 8, r"lora_rank=8: .*lora\.merge=true"),
    ],
)
def test_settings_are_refused(sglang: None, tmp_path: Path, key: str, value: Any, message: str) -> None:
    config = sglang_config(save_model(tmp_path / "model"))
    OmegaConf.update(config, f"actor_rollout_ref.{key}", value, force_add=True)
    with pytest.raises(sglang_cpu.SglangCpuError, match=message):
        sglang_cpu.complete(config)


def test_an_adapter_of_a_further_model_is_refused(sglang: None, tmp_path: Path) -> None:
    """One that is served alone has none."""
    config = sglang_config(save_model(tmp_path / "model"))
    models = {"small": {"model": {"lora_rank": 4}}, "judge": {"trained": False, "model": {"lora_rank": 4}}}
    OmegaConf.update(config, "verl_ext.models", models, force_add=True)
    OmegaConf.update(config, "algorithm.adv_estimator", "grpo", force_add=True)
    with pytest.raises(sglang_cpu.SglangCpuError, match=r"small\.model\.lora_rank=4: .*small\.model\.lora\.merge"):
        sglang_cpu.complete(config)
    OmegaConf.update(config, "verl_ext.models.small.model.lora.merge", True, force_add=True)
    sglang_cpu.complete(config)


def test_merged_adapter_is_served(sglang: None, tmp_path: Path) -> None:
    config = sglang_config(save_model(tmp_path / "model"))
    OmegaConf.update(config, "actor_rollout_ref.model.lora_rank", 8, force_add=True)
    OmegaConf.update(config, "actor_rollout_ref.model.lora", {"merge": True}, force_add=True)
    sglang_cpu.complete(config)


def test_models_are_refused(sglang: None, tmp_path: Path) -> None:
    with pytest.raises(sglang_cpu.SglangCpuError, match="256 tokens, but the model's vocabulary only 200"):
        sglang_cpu.complete(sglang_config(save_model(tmp_path / "small", vocab_size=200)))
    path = save_model(tmp_path / "gemma")
    Gemma2Config(vocab_size=256).save_pretrained(path)
    with pytest.raises(sglang_cpu.SglangCpuError, match="is a gemma2, whose configuration"):
        sglang_cpu.complete(sglang_config(path))


# --- the processes -------------------------------------------------------------------------------------------------


def test_placeholders_can_be_imported_and_say_so_when_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, sglang_cpu_process._Finder])
    try:
        from sgl_kernel.scalar_type import scalar_types

        assert scalar_types.uint4b8 is not None
        with pytest.raises(
            sglang_cpu_process.Missing, match="called sgl_kernel.scalar_type.scalar_types.uint4b8, which"
        ):
            scalar_types.uint4b8(1)
        with pytest.raises(ModuleNotFoundError):
            import sgl_kernels  # noqa: F401
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] in sglang_cpu_process.ABSENT]:
            del sys.modules[name]


def test_nothing_is_prepared_on_other_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    before = list(sys.meta_path)
    monkeypatch.setenv("VERL_PLATFORM", "")
    hooks._sglang(None)
    hooks._sglang_server(None)
    assert sys.meta_path == before


def test_changed_targets_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for SGLang without the function that is wrapped."""
    folder = tmp_path / "sglang" / "srt" / "utils"
    folder.mkdir(parents=True)
    (folder / "patch_torch.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(wraps.UnsupportedVerl, match=r"sglang\.srt\.utils\.patch_torch\._reduce_tensor_modified"):
        wraps.replace(sglang_cpu_process.REDUCTION, lambda original: original)
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)


def test_broken_torchvision_is_refused(sglang: None, tmp_path: Path) -> None:
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    try:
        with pytest.raises(servers.ServerError, match="sglang asks for it without need: pip uninstall -y torchvision"):
            sglang_cpu.complete(sglang_config(save_model(tmp_path / "model")))
    finally:
        sys.modules.pop("torchvision", None)
