# SPDX-License-Identifier: Apache-2.0
"""Comparing runs: readers of verl's logs (`logs`), and the page and pictures of ``verl-ext report``."""
