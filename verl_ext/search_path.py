# SPDX-License-Identifier: Apache-2.0
"""Hydra's search path: ``+recipe=NAME`` finds `recipe/NAME.yaml`, in every program that uses Hydra.

Hydra discovers the class in the module `hydra_plugins.verl_ext`, and imports nothing of ours but this and `recipes`.
"""

from __future__ import annotations

import sys

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from verl_ext.recipes import RecipeError, is_table, recipes_in, search_path_uris, table_message


class RecipeSearchPath(SearchPathPlugin):
    """Appends the folders that hold recipes, after the program's own."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Raises SystemExit: the command line asks for a recipe, and there are none, or for a table of a paper."""
        asked = [name for argument in sys.argv[1:] for name in recipes_in(argument)]
        try:
            for name in asked:
                if "/" in name and is_table(name):
                    # Hydra would merge the table into the configuration and train without any recipe.
                    raise RecipeError(table_message(name))
            uris = search_path_uris()
        except RecipeError as error:
            if asked:
                raise SystemExit(f"verl_ext: {error}") from error
            return  # the program is none of ours
        for uri in uris:
            search_path.append(provider="verl_ext", path=uri)
