# SPDX-License-Identifier: Apache-2.0
"""Images, videos and sound are refused by name: our agent loops hand a model text, and would leave them out.

In the launcher, as far as the data can be looked at there (`check`), and in every trajectory (`prompt_of`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from verl_ext.integration.compat import registrations
from verl_ext.integration.compat.verl_api import data_files
from verl_ext.integration.settings.options import OptionError, select
from verl_ext.rollout.shared.messages import of_text
from verl_ext.rollout.shared.probes import Refusal

MEDIA = {"image_key": "images", "video_key": "videos", "audio_key": "audios"}
"""Keys of ``data`` that name columns which are no text, and verl's defaults."""

BATCH = 64
"""Rows that are read at a time: a column may hold the pixels themselves."""


def prompt_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The chat messages ``raw_prompt`` of a dataset row, each with one text as content. Raises Refusal: a block of a
    message is no text."""
    try:
        return [of_text(message) for message in row["raw_prompt"]]
    except Refusal as error:
        raise Refusal(f"the prompt of row index={row.get('index', '?')} cannot be played: {error}") from None


def check(config: Any) -> None:
    """Raises OptionError: rows of the data that a loop of ours would play have images, videos or sound. Data that are
    no Parquet files on this machine, and loops that an agent loop config names, are not looked at."""
    agent = config.actor_rollout_ref.rollout.get("agent") or {}
    if agent.get("agent_loop_config_path"):
        return
    for path in data_files(config):
        for loop, column in _not_text(path, config.data):
            loop = str(agent.get("default_agent_loop")) if loop is None else loop
            if loop in registrations.AGENT_LOOPS:
                raise OptionError(
                    f"{path} has rows with more than text in the column {column!r}, and the agent loop {loop} would "
                    "hand the model the text alone. Play them with one of verl's own agent loops "
                    "(actor_rollout_ref.rollout.agent.default_agent_loop, or the column agent_name), or leave out the "
                    "rows or the column."
                )


def _not_text(path: str, data: Any) -> Iterator[tuple[str | None, str]]:
    """The rows of a file that are not all text: their ``agent_name``, if they have one, and the column."""
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        with parquet.ParquetFile(path) as file:
            known = file.schema_arrow.names
            prompt = str(select(data, "prompt_key", "prompt"))
            media = [name for key, usual in MEDIA.items() if (name := str(select(data, key, usual))) in known]
            columns = [*media, *[prompt] * (prompt in known and _may_have_blocks(file.schema_arrow.field(prompt).type))]
            names = ["agent_name"] * ("agent_name" in known)
            for batch in file.iter_batches(BATCH, columns=[*columns, *names]) if columns else ():
                loops = batch["agent_name"].to_pylist() if names else [None] * len(batch)
                for column in columns:
                    for loop, value in zip(loops, batch[column], strict=True):
                        if _has_blocks(value.as_py()) if column == prompt else _is_there(value):
                            yield loop, column
    except (OSError, pyarrow.ArrowException):
        return


def _may_have_blocks(kind: Any) -> bool:
    """Whether messages of this type of Arrow may hold anything but one text."""
    return "content" in str(kind) and "content: string" not in str(kind)


def _has_blocks(messages: Any) -> bool:
    try:
        return not all(of_text(message) for message in messages)
    except Refusal:
        return True


def _is_there(value: Any) -> bool:
    """Whether a value of Arrow is neither null nor an empty list."""
    return bool(value.is_valid and (not hasattr(value, "values") or value.values is None or len(value.values)))
