# SPDX-License-Identifier: Apache-2.0
"""Reading and checking `verl_ext.*`."""
