# SPDX-License-Identifier: Apache-2.0
"""A vLLM worker that is killed while the trainer sends it weights."""

from __future__ import annotations

import os
import signal
from typing import Any

from verl_ext.cpu.platform.vllm_cpu_worker import CpuWorkerExtension


class DiesInTheFourthSync(CpuWorkerExtension):
    """The first sync is before the first step, the second after it."""

    syncs = 0

    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> None:
        DiesInTheFourthSync.syncs += 1
        if DiesInTheFourthSync.syncs == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        super().update_weights_from_ipc(*args, **kwargs)
