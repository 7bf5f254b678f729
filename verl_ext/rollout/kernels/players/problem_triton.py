# SPDX-License-Identifier: Apache-2.0
"""The player of a candidate in Triton for a problem in KernelBench's form, on Triton's interpreter."""

from __future__ import annotations

from typing import Any

from verl_ext.rollout.kernels.players import problem_player, triton_player


def play(
    wire: int, memory: int, layout: dict[str, Any], plan: dict[str, Any], names: list[str], lost: list[str]
) -> None:
    """As `triton_player.play`."""
    problem_player.serve(wire, memory, layout, lambda: triton_player.space(plan["code"], lost), "ModelNew")
