"""Where a part lies in a device's memory, as its file in shared memory says."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from trinity_schemas.codec import UNREADABLE

from ....errors import CorruptVersion
from ..base import PartRef

_MOST_BLOCKS = 1 << 12


class LentBlock(Struct, frozen=True, array_like=True, gc=False):
    """A block, and how much of it the part takes, from its beginning."""

    handle: Annotated[bytes, Meta(min_length=1, max_length=256)]
    nbytes: Annotated[int, Meta(gt=0, le=2**62)]


class Layout(Struct, frozen=True):
    """Blocks that follow each other in the part; no tensor and no chunk is in two."""

    device: Annotated[str, Meta(max_length=256)]
    blocks: Annotated[tuple[LentBlock, ...], Meta(max_length=_MOST_BLOCKS)]


_layouts = msgspec.msgpack.Decoder(Layout)


def encoded(layout: Layout) -> bytes:
    """As it is in the file."""
    return msgspec.msgpack.encode(layout)


def decoded(data: memoryview, part: PartRef) -> Layout:
    """As it was. Raises CorruptVersion for what is none."""
    try:
        return _layouts.decode(data)
    except UNREADABLE as error:
        raise CorruptVersion(f"where the {part} lie cannot be read: {error}") from None
