# SPDX-License-Identifier: Apache-2.0
"""The one room for everything untrusted: calls that may run what a model wrote, each in a caged process of its own.

``await Sandbox().call("module:function", *arguments, timeout_s=5)`` gives the function's value or raises
`SandboxError` with a reason. Only JSON crosses the border. Imports nothing else of this package.
"""

from verl_ext.sandbox.cage import CageError, Limits
from verl_ext.sandbox.pool import SETTINGS_VARIABLE, Call, Sandbox, SandboxError, SandboxOptions, check, shared

__all__ = [
    "SETTINGS_VARIABLE",
    "CageError",
    "Call",
    "Limits",
    "Sandbox",
    "SandboxError",
    "SandboxOptions",
    "check",
    "shared",
]
