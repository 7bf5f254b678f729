# SPDX-License-Identifier: Apache-2.0
"""Paper tables: what each one is (``recipe/<method>/<table>.yaml``), how it is run, collected and shown.

``verl-ext reproduce`` is the command; the modules are :mod:`~verl_ext.reproduce.tables` (the definitions),
:mod:`~verl_ext.reproduce.catalogue` (finding them), :mod:`~verl_ext.reproduce.plan` (commands and cost),
:mod:`~verl_ext.reproduce.runs` (run folders), :mod:`~verl_ext.reproduce.run` (running here),
:mod:`~verl_ext.reproduce.cluster` (as jobs of Ray or Slurm), :mod:`~verl_ext.reproduce.collect` (the numbers) and
:mod:`~verl_ext.reproduce.render` (the table).
"""
