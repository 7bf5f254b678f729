# SPDX-License-Identifier: Apache-2.0
"""Everything that knows verl: adapters from registered names to `verl_ext.methods`, turn fields, the trainer mixin."""
