# SPDX-License-Identifier: Apache-2.0
"""A processor in the place of the GPU: the judge, seat, cage and player of the back end `triton`, as they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from verl_ext.rollout.kernels.judge import Judge
from verl_ext.rollout.kernels.players import player
from verl_ext.rollout.kernels.players.cuda import Cuda
from verl_ext.rollout.kernels.seat import DeviceSeat


class StandIn(Cuda):
    """Its memory is the seat's."""

    def lacks(self) -> str:
        return ""

    def share(self, memory: int, shape: Sequence[int]) -> tuple[list[torch.Tensor], str]:
        return player.views(memory, *shape), ""

    def open(self, memory: int, handle: str, shape: Sequence[int]) -> list[torch.Tensor]:
        return player.views(memory, *shape)

    def free(self, views: Sequence[torch.Tensor]) -> None:
        pass

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def synchronise(self) -> None:
        pass

    def flush(self) -> None:
        pass

    def limit(self, memory_mb: int) -> None:
        pass


class StandInSeat(DeviceSeat):
    target = "standin_player:play"
    device = StandIn()


class StandInJudge(Judge):
    device_seat = StandInSeat
