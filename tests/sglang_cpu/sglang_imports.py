# SPDX-License-Identifier: Apache-2.0
"""What a process of a run with SGLang imports of it, without verl and Ray: half of a minute on a busy machine."""

from verl_ext.cpu.platform import sglang_cpu_process

sglang_cpu_process.prepare()

import sglang.srt.entrypoints.http_server  # noqa: E402
import sglang.srt.managers.scheduler  # noqa: E402
import sglang.srt.model_executor.model_runner  # noqa: E402, F401
