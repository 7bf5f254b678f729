# SPDX-License-Identifier: Apache-2.0
"""Paper tables: what each one is (``recipe/<method>/<table>.yaml``), how it is run, collected and shown.

``verl-ext reproduce`` is the command; the modules are :mod:`~verl_ext.lab.reproduce.tables` (the definitions),
:mod:`~verl_ext.lab.reproduce.catalogue` (finding them), :mod:`~verl_ext.lab.reproduce.plan` (commands and cost),
:mod:`~verl_ext.lab.reproduce.runs` (run folders), :mod:`~verl_ext.lab.reproduce.run` (running here),
:mod:`~verl_ext.lab.reproduce.ray_jobs` (as jobs of Ray), :mod:`~verl_ext.lab.reproduce.collect` (the numbers)
and :mod:`~verl_ext.lab.reproduce.render` (the table).
"""
