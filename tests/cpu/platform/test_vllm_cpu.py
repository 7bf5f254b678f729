# SPDX-License-Identifier: Apache-2.0
"""What is filled in, found and refused for vLLM on the CPU, without vLLM."""

from __future__ import annotations

import copy
import importlib.metadata
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf
from transformers import LlamaConfig, PreTrainedTokenizerFast

from verl_ext.cpu.platform import hooks, servers, settings, vllm_cpu
from verl_ext.cpu.platform.fork_worker import IMPORTS


@pytest.fixture(autouse=True)
def own_finders(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's finders as they were, after each test."""
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if not isinstance(f, vllm_cpu._Finder)])
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)


def install(folder: Path, name: str, version: str) -> None:
    """The metadata of a distribution, as pip leaves it."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text("[verl_ext.tests]\nonce = json:dumps\n")


@pytest.fixture
def vllm_031(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    install(tmp_path, "vllm-cpu", "0.31.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path


# --- the distribution ----------------------------------------------------------------------------------------------


def test_cpu_build_answers_to_the_name_vllm(vllm_031: Path) -> None:
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("vllm")
    vllm_cpu.present_as_vllm()
    vllm_cpu.present_as_vllm()
    assert importlib.metadata.version("vllm") == "0.31.0+cpu"
    assert importlib.metadata.version("vllm-cpu") == "0.31.0"
    assert importlib.metadata.metadata("vllm")["Version"] == "0.31.0"
    assert str(vllm_cpu.installed_version()) == "0.31.0+cpu"
    # A listing has it once, and nothing can be imported that could not be before.
    assert len(importlib.metadata.entry_points(group="verl_ext.tests")) == 1
    with pytest.raises(ModuleNotFoundError):
        import vllm  # noqa: F401


def test_distribution_of_the_name_comes_first(vllm_031: Path) -> None:
    install(vllm_031, "vllm", "0.30.0+cpu")
    vllm_cpu.present_as_vllm()
    assert importlib.metadata.version("vllm") == "0.30.0+cpu"


@pytest.mark.parametrize(
    ("name", "version", "message"),
    [
        (None, None, "needs the distribution vllm-cpu.*embedded"),
        ("vllm", "0.24.0", "vllm 0.24.0 is installed, which is not a CPU build"),
        ("vllm-cpu", "0.32.1", r"vllm 0.32.1\+cpu is installed.*vllm-cpu>=0.27,<0.32"),
        ("vllm-cpu", "0.26.0", r"vllm 0.26.0\+cpu is installed"),
    ],
)
def test_unfit_installations_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str | None, version: str, message: str
) -> None:
    if name:
        install(tmp_path, name, version)
        monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(vllm_cpu.VllmCpuError, match=message):
        vllm_cpu.installed_version()


def test_broken_torchvision_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    servers.check_torchvision("vllm-cpu")  # not installed: nothing to say
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(servers.ServerError, match="nms does not exist.*pip uninstall -y torchvision"):
        servers.check_torchvision("vllm-cpu")


# --- the settings --------------------------------------------------------------------------------------------------


def save_model(folder: Path, **sizes: Any) -> Path:
    """Config and tokenizer of a model whose tokenizer has 256 tokens; no weights."""
    from tokenizers import Tokenizer, models

    vocabulary = {chr(32 + i): i for i in range(256)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocabulary, merges=[])))
    tokenizer.save_pretrained(folder)
    given = {"vocab_size": 256, "hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2, **sizes}
    LlamaConfig(max_position_embeddings=512, **given).save_pretrained(folder)
    return folder


def run_config(model: Path | str, **rollout: Any) -> Any:
    return OmegaConf.create(
        {
            "trainer": {"n_gpus_per_node": 2, "nnodes": 1},
            "reward": {"reward_model": {}},
            "actor_rollout_ref": {
                "model": {"path": str(model), "hf_config_path": None, "tokenizer_path": None},
                "rollout": {
                    "name": "vllm",
                    "dtype": "float32",
                    "tensor_model_parallel_size": 1,
                    "max_num_seqs": 16,
                    "max_model_len": None,
                    "prompt_length": 64,
                    "response_length": 8,
                    "engine_kwargs": {"vllm": {}},
                    **rollout,
                },
            },
            "verl_ext": {"platform": "cpu", "env": {}},
        }
    )


def test_run_on_vllm_is_completed(vllm_031: Path, tmp_path: Path) -> None:
    config = run_config(save_model(tmp_path / "model"))
    config.distillation = {"enabled": True, "n_gpus_per_node": 1, "nnodes": 1}
    settings.complete(config)
    assert config.actor_rollout_ref.rollout.engine_kwargs.vllm == {
        "enable_sleep_mode": False,
        "worker_extension_cls": "verl_ext.cpu.platform.vllm_cpu_worker.CpuWorkerExtension",
        "distributed_executor_backend": "uni",
        "enforce_eager": True,
        # 2 (keys, values) * 2 layers * 2 heads * 32 * 4 bytes, 128 tokens a sequence, 16 sequences
        "kv_cache_memory_bytes": 2 * 2 * 2 * 32 * 4 * 128 * 16,
    }
    assert config.verl_ext.env == {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VERL_EXT_FORK_IMPORTS": f"{IMPORTS},verl.workers.rollout.vllm_rollout.vllm_async_server",
    }
    assert config.ray_kwargs.ray_init.num_gpus == 2 + 1, "the run's and the distillation teacher's"


def test_what_the_user_says_stays(vllm_031: Path, tmp_path: Path) -> None:
    given = {"enforce_eager": False, "kv_cache_memory_bytes": 1 << 30, "worker_extension_cls": "mine.Extension"}
    config = run_config(save_model(tmp_path / "model"), engine_kwargs={"vllm": dict(given)})
    config.verl_ext.env = {"VLLM_CPU_OMP_THREADS_BIND": "0-1"}
    vllm_cpu.complete(config)
    found = config.actor_rollout_ref.rollout.engine_kwargs.vllm
    assert {key: found[key] for key in given} == given
    assert found.enable_sleep_mode is False
    assert config.verl_ext.env.VLLM_CPU_OMP_THREADS_BIND == "0-1"


def test_shells_kv_cache_size_stays(vllm_031: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    config = run_config(save_model(tmp_path / "model"))
    vllm_cpu.complete(config)
    assert "kv_cache_memory_bytes" not in config.actor_rollout_ref.rollout.engine_kwargs.vllm


def test_other_engines_are_left_alone(tmp_path: Path) -> None:
    """Also where no vLLM is installed and the model does not exist."""
    config = run_config(tmp_path / "nowhere", name="embedded")
    before = copy.deepcopy(config)
    vllm_cpu.complete(config)
    assert config == before


def test_sleep_mode_is_refused(vllm_031: Path, tmp_path: Path) -> None:
    config = run_config(save_model(tmp_path / "model"), engine_kwargs={"vllm": {"enable_sleep_mode": True}})
    with pytest.raises(vllm_cpu.VllmCpuError, match="enable_sleep_mode=true"):
        vllm_cpu.complete(config)


@pytest.mark.parametrize("sizes", [{"num_attention_heads": 4}, {"head_dim": 48}])
def test_head_size_without_a_kernel_is_refused(vllm_031: Path, tmp_path: Path, sizes: dict[str, int]) -> None:
    config = run_config(save_model(tmp_path / "model", **sizes))
    size = sizes.get("head_dim", 16)
    with pytest.raises(vllm_cpu.VllmCpuError, match=f"attention heads of size {size}; .*32, 64.*embedded"):
        vllm_cpu.complete(config)


def test_vocabulary_smaller_than_the_tokenizers_is_refused(vllm_031: Path, tmp_path: Path) -> None:
    config = run_config(save_model(tmp_path / "model", vocab_size=200))
    with pytest.raises(vllm_cpu.VllmCpuError, match="256 tokens, but the model's vocabulary only 200"):
        vllm_cpu.complete(config)


def test_padded_vocabulary_is_warned_of(vllm_031: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    vllm_cpu.complete(run_config(save_model(tmp_path / "model", vocab_size=256)))
    assert not caplog.records
    vllm_cpu.complete(run_config(save_model(tmp_path / "padded", vocab_size=288)))
    assert "the 32 ids without a token" in caplog.text


def test_kv_cache_holds_the_longest_sequence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    model = LlamaConfig.from_pretrained(save_model(tmp_path / "model"))
    token = 2 * 2 * 2 * 32 * 4
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=0))
    config = run_config(tmp_path / "model")
    assert servers.kv_cache_bytes(model, config) == (512 + 128) * token
    config.actor_rollout_ref.rollout.max_model_len = 200
    assert servers.kv_cache_bytes(model, config) == (256 + 128) * token
    config.actor_rollout_ref.rollout.dtype = "bfloat16"
    assert servers.kv_cache_bytes(model, config) == (256 + 128) * token // 2
    # Two replicas share an eighth of the free memory.
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=16 << 30))
    config.actor_rollout_ref.rollout.max_num_seqs = 1 << 30
    assert servers.kv_cache_bytes(model, config) == 1 << 30


@pytest.mark.parametrize("platform", ["cpu", None])
def test_weight_sync_is_watched_on_the_cpu_alone(platform: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    import verl  # noqa: F401  (its plugins register the platform)

    stock = "verl.workers.rollout.vllm_rollout.ServerAdapter"
    module = SimpleNamespace(_ROLLOUT_REGISTRY={("vllm", "async"): stock})
    monkeypatch.setattr(os, "environ", {**os.environ})
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    if platform:
        monkeypatch.setenv("VERL_PLATFORM", platform)
    hooks.HOOKS["verl.workers.rollout.base"][1](module)
    expected = "verl_ext.cpu.platform.vllm_cpu_sync.WatchedServerAdapter" if platform else stock
    assert module._ROLLOUT_REGISTRY[("vllm", "async")] == expected
