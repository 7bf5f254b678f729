# SPDX-License-Identifier: Apache-2.0
"""verl_ext: published RL methods for language-model agents, as recipes for an unmodified verl.

Importing this package imports nothing heavy: torch, Ray and verl are loaded by the modules that need them.
"""

__version__ = "0.2.0"
