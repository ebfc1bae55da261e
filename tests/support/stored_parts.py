"""Look up what a transport stores of a part."""

import contextlib

from tests.support.ray_clusters import in_ray
from trinity_events.server import open_client
from trinity_events.system.shared_memory import users_folder
from trinity_events.weights import SharedMemoryStore
from trinity_events.weights.transports.cuda.layout import decode_layout


def find_stored(where, run_id, pid=None, reader=None) -> list:
    """Return what the transport has of a run, or of a publisher that died.

    Of a collective group that is with those who receive.
    """
    if where.name == "collective":
        newest = reader._staging.newest() if reader is not None else None
        return [] if newest is None else [newest]
    if where.name == "redis":
        with open_client(where.weights_url) as client:
            return client.keys(f"trinity-weights:{{{run_id}.*")
    if where.name == "ray":
        return in_ray(run_id)
    folder = users_folder()
    return [*folder.glob(f"*/{run_id}~*"), *(folder.glob(f"*{pid}-*/*") if pid else ())]


def layout(part):
    """Where a part lies on a device."""
    with contextlib.closing(SharedMemoryStore().open(part)) as file:
        return decode_layout(file.data, part)


def segment(part):
    [path] = users_folder().glob(f"*/{'~'.join(map(str, part))}")
    return path
