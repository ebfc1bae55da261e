"""Location of a part in a device's memory, as stored in its shared-memory file."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from trinity_schemas.codec import UNREADABLE

from ...errors import CorruptPart
from ..base import PartRef

_MOST_BLOCKS = 1 << 12  # bounds what a damaged layout can ask for


class LentBlock(Struct, frozen=True, array_like=True, gc=False):
    """Block of device memory, and the number of its first bytes that the part uses."""

    handle: Annotated[bytes, Meta(min_length=1, max_length=256)]
    nbytes: Annotated[int, Meta(gt=0, le=2**62)]


class PartBlocks(Struct, frozen=True):
    """Consecutive blocks of the part; no tensor and no chunk spans two of them."""

    device: Annotated[str, Meta(max_length=256)]
    blocks: Annotated[tuple[LentBlock, ...], Meta(max_length=_MOST_BLOCKS)]


_layouts = msgspec.msgpack.Decoder(PartBlocks)


def encode_layout(layout: PartBlocks) -> bytes:
    """Encode the layout for the file."""
    return msgspec.msgpack.encode(layout)


def decode_layout(data: memoryview, part: PartRef) -> PartBlocks:
    """Decode a layout. Raises CorruptVersion if the data is not one."""
    try:
        return _layouts.decode(data)
    except UNREADABLE as error:
        raise CorruptPart(version=str(part), fault="location", reason=str(error)) from None
