# SPDX-License-Identifier: Apache-2.0
"""What runs inside verl's training workers: mixins of its FSDP engines. Its trainer's side is in `parts`."""
