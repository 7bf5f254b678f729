# SPDX-License-Identifier: Apache-2.0
"""The environments that ship, one file each."""
