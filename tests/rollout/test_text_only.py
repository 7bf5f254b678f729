# SPDX-License-Identifier: Apache-2.0
"""Images, videos and sound are refused: our loops would hand the model the text alone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hydra import compose
from loops import QUESTION, Scripted, make_loop
from omegaconf import OmegaConf

from verl_ext.integration import checks
from verl_ext.integration.compat import registrations
from verl_ext.integration.settings.options import OptionError

NODE = {
    "environment": {"name": "environment_zoo:Corridor"},
    "orchestra": {"name": "solver_verifier"},
    "gateway": {"agent": "math:sqrt"},
    "kernels": {"workers": 1},
}
IMAGE = {"type": "image", "image": "picture.png"}


@pytest.mark.parametrize("name", registrations.AGENT_LOOPS)
def test_a_prompt_with_an_image_is_refused_by_name(tokenizer: Any, name: str) -> None:
    """Where one passed, a model learned to answer without it: no loop of ours hands images on."""
    rollout = {"prompt_length": 256, "response_length": 16, "n": 2}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "data": {}, "verl_ext": NODE})
    engine = Scripted(tokenizer, lambda prompt: "12")
    row = {"raw_prompt": [{"role": "user", "content": [IMAGE, {"type": "text", "text": QUESTION}]}], "index": 4}
    row["extra_info"] = {"index": 4, "task": "relu"}

    async def run() -> Any:
        return await make_loop(name, config, engine, tokenizer).run({"temperature": 1.0}, **row)

    with pytest.raises(ValueError, match="row index=4 .*a message of the user has a block of the type 'image'"):
        asyncio.run(run())
    assert not engine.prompts


TEXT = [{"role": "user", "content": QUESTION}]
BLOCKS = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
SEEN = [{"role": "user", "content": [{"type": "text", "text": QUESTION}, {"type": "image", "text": None}]}]
LOOP = "actor_rollout_ref.rollout.agent.default_agent_loop=verl_ext_multi_turn"


@pytest.mark.parametrize(
    ("rows", "overrides", "column"),
    [
        ({"prompt": [TEXT, TEXT], "images": [[], [b"pixels"]]}, [LOOP], "images"),
        ({"prompt": [TEXT, TEXT], "pictures": [None, "a.png"]}, [LOOP, "data.image_key=pictures"], "pictures"),
        ({"prompt": [TEXT], "audios": [[{"audio": "a.wav"}]]}, [LOOP], "audios"),
        ({"prompt": [BLOCKS, SEEN]}, [LOOP], "prompt"),
        ({"prompt": [TEXT, TEXT], "images": [[], []], "videos": [None, None]}, [LOOP], ""),
        ({"prompt": [BLOCKS]}, [LOOP], ""),
        ({"prompt": [SEEN]}, [], ""),  # verl's own loop
        ({"prompt": [TEXT, TEXT], "images": [["a"], []], "agent_name": ["tool_agent", "verl_ext_step_wise"]}, [], ""),
        ({"prompt": [TEXT], "images": [["a"]], "agent_name": ["verl_ext_step_wise"]}, [], "images"),
    ],
)
@pytest.mark.usefixtures("verl_configuration")
def test_data_with_images_are_refused_at_launch(
    tmp_path: Path, rows: dict[str, Any], overrides: list[str], column: str
) -> None:
    pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / "rows.parquet")
    files = [f"data.train_files={tmp_path}/absent.parquet", f"data.val_files=[{tmp_path}/rows.parquet]"]
    config = compose("ppo_trainer", ["+recipe=trloo", "actor_rollout_ref.rollout.n=2", *files, *overrides])
    if not column:
        checks.check(config)
        return
    with pytest.raises(OptionError, match=f"rows.parquet has rows with more than text in the column '{column}'"):
        checks.check(config)
