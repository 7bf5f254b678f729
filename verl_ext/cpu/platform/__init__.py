# SPDX-License-Identifier: Apache-2.0
"""Everything that lets the unmodified verl run without an accelerator.

`+recipe=cpu` is the way in. Nothing in this package acts unless the platform named ``cpu`` is the current one.
"""
