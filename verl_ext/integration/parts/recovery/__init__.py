# SPDX-License-Identifier: Apache-2.0
"""What dies in a run, and who is told."""
