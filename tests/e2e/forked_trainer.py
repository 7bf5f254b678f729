# SPDX-License-Identifier: Apache-2.0
"""`python -m verl.trainer.main_ppo` in a process forked from the one with the imports; the exit code goes to a file."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from pathlib import Path

for name in ("RAY_RAYLET_PID", "RAY_JOB_ID"):  # a launcher is no worker of Ray
    del os.environ[name]
sys.path[0] = os.getcwd()
code = 0
try:
    runpy.run_module("verl.trainer.main_ppo", run_name="__main__", alter_sys=True)
except SystemExit as end:
    code = end.code if isinstance(end.code, int) else int(end.code is not None)
    if isinstance(end.code, str):
        print(end.code, file=sys.stderr)
except BaseException:
    traceback.print_exc()
    code = 1
import ray  # noqa: E402

ray.shutdown()
Path("exit_code").write_text(str(code))
