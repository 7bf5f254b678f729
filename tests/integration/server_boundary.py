# SPDX-License-Identifier: Apache-2.0
"""What verl's own vLLM and SGLang servers hand to their engine under a composed config, without either engine.

    python server_boundary.py vllm|sglang CONFIG.json PARAMS.json
    python server_boundary.py sglang numbers RANKS.json GPUS

verl's server code runs as it is. Modules of the engine itself are stood in for by empty ones whose classes keep what
they are given; the engine's arguments and each request's sampling parameters are printed as one line of JSON. With
`numbers`: what verl makes of the numbers of replicas.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.machinery
import importlib.metadata
import json
import os
import sys
import types
from typing import Any

ENGINES = ("vllm", "sglang", "torch_memory_saver", "zmq", "msgspec", "compressed_tensors")


class Kept:
    """Any class of the engine: keeps its arguments."""

    def __init__(self, *args: Any, **given: Any) -> None:
        self.__dict__.update(given)
        self.given = given


class Module(types.ModuleType):
    """Any module of the engine: every name in it is a class."""

    __path__: list[str] = []
    __version__ = "0.24.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (Kept,), {"__module__": self.__name__})
        setattr(self, name, made)
        return made


class Finder:
    """Finds every module of the engines that is not installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] in ENGINES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: Any) -> Any:
        return Module(spec.name)

    def exec_module(self, module: Any) -> None:
        """Nothing to run."""


class Reached(Exception):
    """The engine would start now."""


def server(kind: str, config: Any) -> tuple[Any, Any]:
    """An instance of verl's server with its real rollout config, and its module."""
    from omegaconf import OmegaConf
    from verl.utils.config import omega_conf_to_dataclass

    if kind == "vllm":
        from verl.workers.rollout.vllm_rollout import vllm_async_server as module

        cls = module.vLLMHttpServer
    else:
        from verl.workers.rollout.sglang_rollout import async_sglang_server as module

        cls = module.SGLangHttpServer
    made = cls.__new__(cls)
    rollout = OmegaConf.create(config)
    made.config = omega_conf_to_dataclass(rollout)
    made.config.max_model_len = 128
    made.model_config = types.SimpleNamespace(
        local_path="model",
        trust_remote_code=False,
        processor=None,
        lora_rank=0,
        lora={},
        tokenizer=None,
        hf_config=None,
    )
    made.replica_rank = made.node_rank = made.base_gpu_id = made.global_steps = made._admitting = 0
    made.nnodes, made.gpus_per_node, made.workers = 1, 1, []
    made.rollout_mode = None
    made._disaggregation_role, made._submission_paused = "null", False
    made._should_profile = lambda: False
    made._server_address = "127.0.0.1"
    return made, module


async def numbers(ranks: list[int], gpus: int) -> list[dict[str, Any]]:
    """For verl's SGLang replica of each of these numbers: its server's name and first GPU, and the server that the
    training worker of that number looks for. Ray is stood in for as the engine is."""
    import ray
    from verl.workers.rollout.base import BaseRollout
    from verl.workers.rollout.sglang_rollout import async_sglang_server as module
    from verl.workers.rollout.sglang_rollout.sglang_rollout import ServerAdapter

    found: list[dict[str, Any]] = []

    async def answer(result: Any) -> Any:
        return result

    def actor(**answers: Any) -> Any:
        calls = {name: types.SimpleNamespace(remote=lambda *_, to=to, **__: answer(to)) for name, to in answers.items()}
        return types.SimpleNamespace(**calls)

    def options(name: str, **rest: Any) -> Any:
        def start(base_gpu_id: int, **given: Any) -> Any:
            found.append({"server": name, "first_gpu": base_gpu_id})
            return actor(launch_server=None, get_server_address=("127.0.0.1", 1))

        return types.SimpleNamespace(remote=start)

    def look_for(name: str) -> Any:
        found[-1]["looked_for"] = name
        raise Reached

    ray.get_actor = look_for
    os.environ |= {f"RAY_EXPERIMENTAL_NOSET_{module.visible_devices_keyword}": "1"}
    os.environ |= {"RANK": "1", "RAY_LOCAL_WORLD_SIZE": str(gpus)}
    config = types.SimpleNamespace(
        tensor_model_parallel_size=1, data_parallel_size=1, pipeline_model_parallel_size=1, max_num_seqs=1, get=Kept
    )
    BaseRollout.__init__ = lambda self, config, model_config, mesh: self.__dict__.update(  # type: ignore[method-assign]
        config=config, model_config=model_config, device_mesh=mesh
    )
    for rank in ranks:
        replica = module.SGLangReplica.__new__(module.SGLangReplica)
        replica.__dict__.update(
            replica_rank=rank, config=config, model_config=None, rollout_mode=None, servers=[], name_suffix="",
            is_reward_model=False, is_teacher_model=False, world_size=1, nnodes=1, gpus_per_node=gpus,
            gpus_per_replica_node=1, workers=[actor(__ray_call__=("a" * 56, "0"))],
            server_class=types.SimpleNamespace(options=options),
        )  # fmt: skip
        await replica.launch_servers()
        model = types.SimpleNamespace(lora_rank=0, lora={})
        end = ServerAdapter(config, model, {"infer_tp": types.SimpleNamespace(get_local_rank=lambda: 0)}, rank)
        with contextlib.suppress(Reached):
            await end._init_server_adapter()
    return found


def main(kind: str, config: str, params: str, gpus: str = "") -> None:
    sys.meta_path.append(Finder())  # type: ignore[arg-type]
    installed = importlib.metadata.version
    importlib.metadata.version = lambda name: Module.__version__ if name in ENGINES else installed(name)
    if config == "numbers":
        print("\n" + json.dumps(asyncio.run(numbers(json.loads(params), int(gpus)))))
        return
    made, module = server(kind, json.loads(config))
    found: dict[str, Any] = {}

    def keep(arguments: Any, *rest: Any, **named: Any) -> Any:
        found["engine"] = {**(arguments if isinstance(arguments, dict) else {}), **named}
        raise Reached

    if kind == "vllm":
        module.build_cli_args_from_config = keep
    else:

        @dataclasses.dataclass
        class ServerArgs:
            model_path: str = ""

        module.ServerArgs = ServerArgs
        ServerArgs.__init__ = lambda self, **given: keep(given)  # type: ignore[assignment,method-assign]
    try:
        asyncio.run(made.launch_server())
    except Reached:
        pass

    class Engine:
        """The engine's end of a request."""

        async def generate(self, prompt: Any, sampling_params: Any, **rest: Any) -> Any:
            found["request"] = sampling_params.given
            raise Reached
            yield

        def generate_request(self, request: Any, *rest: Any) -> Any:
            found["request"] = request.given["sampling_params"]
            found["return_logprob"] = request.given["return_logprob"]
            raise Reached

    made.engine = made.tokenizer_manager = Engine()
    try:
        asyncio.run(made.generate([1, 2, 3], json.loads(params), "request"))
    except Reached:
        pass
    print("\n" + json.dumps(found, default=str))


if __name__ == "__main__":
    main(*sys.argv[1:])
