# SPDX-License-Identifier: Apache-2.0
"""The one seam with verl's store of sequences, transfer_queue 0.1 of verl 0.9.1: no other module here imports it.

Sequences lie in partitions (``train``, ``val``) by key; a batch (``KVBatchMeta``) names a partition and keys of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def fetch(batch: Any, fields: Sequence[str], keys: Sequence[str] | None = None) -> Any:
    """These fields of a batch's sequences, or of some of them, as a tensordict."""
    import transfer_queue as tq

    return tq.kv_batch_get(
        keys=list(batch.keys if keys is None else keys), partition_id=batch.partition_id, select_fields=list(fields)
    )


def write(
    batch: Any, fields: Mapping[str, Any], keys: Sequence[str] | None = None, tags: Sequence[Any] | None = None
) -> Any:
    """Write columns, and tags, of a batch's sequences or of some of them; the batch with what it has now."""
    import transfer_queue as tq
    from tensordict import TensorDict

    chosen = list(batch.keys if keys is None else keys)
    columns = TensorDict(dict(fields), batch_size=len(chosen))
    more = {} if tags is None else {"tags": list(tags)}
    return tq.kv_batch_put(keys=chosen, partition_id=batch.partition_id, fields=columns, **more)


async def put_tag(partition: str, key: str, tag: Mapping[str, Any]) -> None:
    """A sequence of a tag alone."""
    import transfer_queue as tq

    await tq.async_kv_put(key=key, partition_id=partition, tag=dict(tag))


def tags(partition: str) -> dict[str, dict[str, Any]]:
    """The tags of a partition's sequences by key."""
    import transfer_queue as tq

    return dict((tq.kv_list(partition) or {}).get(partition, {}))


def clear(partition: str, keys: Sequence[str]) -> None:
    """Remove sequences."""
    import transfer_queue as tq

    tq.kv_clear(keys=list(keys), partition_id=partition)


def start(config: Any) -> None:
    """Start the store, for a process without verl's trainer; `stop` ends it."""
    import transfer_queue as tq

    tq.init(config.transfer_queue)


def stop() -> None:
    """End the store."""
    import transfer_queue as tq

    tq.close()
