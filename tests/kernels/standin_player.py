# SPDX-License-Identifier: Apache-2.0
"""What the zygote of `standin.StandInJudge` imports: Triton's interpreter, and then what a GPU's player is."""

from __future__ import annotations

from typing import Any

from verl_ext.rollout.kernels.players import triton_player  # noqa: F401  (first: it decides that Triton interprets)

from verl_ext.rollout.kernels.players import cuda_player  # isort: skip
from standin import StandIn


def play(*given: Any) -> None:
    wire, memory, shape, plan, _, lost = given
    cuda_player.serve(StandIn(), wire, memory, shape, plan, lost)
