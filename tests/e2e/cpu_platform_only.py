# SPDX-License-Identifier: Apache-2.0
"""The CPU platform without the rest of verl_ext: what a GPU would be in a run that names nothing of ours."""

from __future__ import annotations

import wrapt

from verl_ext.cpu.platform import cpu, hooks

cpu.register()
for module, (_, function) in hooks.HOOKS.items():
    wrapt.register_post_import_hook(function, module)
