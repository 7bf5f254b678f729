# SPDX-License-Identifier: Apache-2.0
"""What measures on one's own machine: demo, tables of papers, reports, benchmarks. Nothing below imports it."""
