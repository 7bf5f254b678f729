# SPDX-License-Identifier: Apache-2.0
"""`verl-ext sandbox`: what the cage holds on this machine, and attempts to escape it."""
