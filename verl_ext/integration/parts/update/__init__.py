# SPDX-License-Identifier: Apache-2.0
"""What an update is told."""
