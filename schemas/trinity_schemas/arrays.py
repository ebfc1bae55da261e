"""Arrays of numbers in messages: bytes with a type and a length, read in place.

1. An array that was decoded has exactly ``length`` numbers of its ``dtype``.
2. Reading one copies nothing: :attr:`TypedArray.view` is a view of the message's bytes.
3. Equality is that of the numbers, whatever their type.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, overload

from msgspec import Meta, Struct

from .errors import ArrayDamaged, ArrayValuesRefused

_FORMATS = {"uint16": "H", "int32": "i", "float32": "f"}
"""Formats of :mod:`struct` by type; their sizes are the same on every platform of CPython."""
_SIZES = {"uint16": 2, "int32": 4, "float32": 4}
_Length = Annotated[int, Meta(ge=0, le=2**31, description="Number of values.")]
_Data = Annotated[bytes, Meta(description="Values, in little-endian order, without a gap.")]


class TypedArray(Struct, frozen=True, eq=False, gc=False):
    """Numbers of one type. The subclasses name the types that they may have."""

    dtypes: ClassVar[tuple[str, ...]] = ()
    """Types that values are packed in, in order of preference."""

    dtype: str
    length: _Length
    data: _Data

    def __post_init__(self) -> None:
        # A sender chooses both: else ``len`` and ``view`` might differ.
        if len(self.data) != self.length * _SIZES[self.dtype]:
            raise ArrayDamaged(self.dtype, self.length, len(self.data))

    @classmethod
    def pack(cls, values: Iterable[float]) -> Self:
        """Return an array of values, of the first type that holds all of them.

        Raises:
            ArrayValuesRefused: A value is no number of these types.
        """
        values = values if isinstance(values, Sequence) else list(values)
        for dtype in cls.dtypes:
            try:
                packed = array(_FORMATS[dtype], values)
            except OverflowError:
                # The type is too narrow for a value, such as an id of 65,536 or more: the next one.
                continue
            except TypeError as error:
                raise ArrayValuesRefused(cls.dtypes, str(error)) from None
            # The wire is little-endian, and ``array`` packs in the order of the host.
            if sys.byteorder != "little":
                packed.byteswap()
            return cls(dtype, len(packed), packed.tobytes())
        raise ArrayValuesRefused(cls.dtypes, "a value is out of their range")

    @property
    def view(self) -> memoryview:
        """Values as a one-dimensional buffer, for ``numpy.asarray`` or an index, without a copy."""
        data = self.data
        # The one copy: such hosts cannot read the bytes of the message as they are.
        if sys.byteorder != "little":
            swapped = array(_FORMATS[self.dtype], data)
            swapped.byteswap()
            data = swapped.tobytes()
        return memoryview(data).cast(_FORMATS[self.dtype])  # type: ignore[call-overload,no-any-return]

    def __len__(self) -> int:
        """Return the number of values."""
        return self.length

    def __iter__(self) -> Iterator[Any]:
        """Yield each value as a Python number."""
        return iter(self.view)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        """Return a value, or the list of those of a slice."""
        return self.view[index].tolist() if isinstance(index, slice) else self.view[index]

    def __eq__(self, other: object) -> bool:
        """Return True for an array or a list of equal values."""
        # By value: ids that fit into two bytes may come in four.
        if isinstance(other, TypedArray):
            return self.view == other.view
        return self.view.tolist() == other if isinstance(other, list) else NotImplemented

    # Equal arrays may have other bytes, so that a hash would have to read all values.
    __hash__ = None  # type: ignore[assignment]


class TokenArray(TypedArray, frozen=True, eq=False, gc=False):
    """Token ids: two bytes each where all are below 65,536, else four."""

    dtypes: ClassVar = ("uint16", "int32")
    dtype: Annotated[Literal["uint16", "int32"], Meta(description="Type of the ids.")]


class FloatArray(TypedArray, frozen=True, eq=False, gc=False):
    """Numbers in float32, such as log-probabilities."""

    dtypes: ClassVar = ("float32",)
    dtype: Annotated[Literal["float32"], Meta(description="Type of the numbers.")]
