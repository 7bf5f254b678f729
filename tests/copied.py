# SPDX-License-Identifier: Apache-2.0
"""``python copied.py FILE WORDS``: what ``python WORDS`` does, in a copied process; the exit code goes to the file.

The process's own number is in ``FILE.pid``.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from pathlib import Path

for name in ("RAY_RAYLET_PID", "RAY_JOB_ID"):  # it is no worker of Ray
    del os.environ[name]
_, file, *sys.argv = sys.argv
Path(f"{file}.pid").write_text(str(os.getpid()))
code = 0
try:
    if sys.argv[0] == "-m":
        sys.path[0] = os.getcwd()
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif sys.argv[0] == "-c":
        sys.path[0] = ""
        program = sys.argv.pop(1)
        exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    code = end.code if isinstance(end.code, int) else int(end.code is not None)
    if isinstance(end.code, str):
        print(end.code, file=sys.stderr)
except BaseException:
    traceback.print_exc()
    code = 1
if ray := sys.modules.get("ray"):
    ray.shutdown()
Path(file).write_text(str(code))
