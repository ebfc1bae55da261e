"""Types of the fields of a configuration, with their bounds."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
Cpus = Annotated[float, Meta(gt=0)]
Gpus = Annotated[float, Meta(ge=0)]
DtypeName = Literal["float32", "bfloat16"]
