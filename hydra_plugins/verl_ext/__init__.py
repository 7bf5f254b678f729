# SPDX-License-Identifier: Apache-2.0
"""What Hydra finds by itself, with or without verl's plugin: the folders with the recipes.

So ``+recipe=NAME`` is never a plain key where verl_ext is installed. Where its plugin is hidden from verl, the callback
that each recipe brings ends the run (`verl_ext.integration.launch`).
"""

from verl_ext.search_path import RecipeSearchPath

__all__ = ["RecipeSearchPath"]
