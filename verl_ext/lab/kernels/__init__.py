# SPDX-License-Identifier: Apache-2.0
"""`verl-ext kernels`: the judge measured, programs that cheat, and search at test time."""
