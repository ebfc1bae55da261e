"""Families of reasoning-gym, each imported without the others."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

_NAME = "reasoning_gym"
_IMPORTING = threading.Lock()
"""Two imports at once would remove each other's packages."""


def create_family(package: str, family: str, options: Mapping[str, Any]) -> Any:
    """Return the dataset of a family, of which only its own module is imported.

    Importing reasoning-gym imports every family, and with them sympy and matplotlib: 1.2 s in each
    process of a run that draws questions. A process that has imported it uses that import.

    Args:
        package: Package of the family's module.
        family: Name of the family, and of its module.
        options: Options of the family.

    Raises:
        ImportError: reasoning-gym is not installed.
    """
    with _IMPORTING:
        if _NAME not in sys.modules and (root := _find_root()) is not None:
            with _empty_packages(root, package):
                if find_spec(f"{_NAME}.{package}.{family}") is not None:
                    importlib.import_module(f"{_NAME}.{package}.{family}")
                    factory = importlib.import_module(f"{_NAME}.factory")
                    return factory.create_dataset(family, **options)
    # Another release may have the family elsewhere.
    return importlib.import_module(_NAME).create_dataset(family, **options)


def _find_root() -> Path | None:
    spec = find_spec(_NAME)
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


@contextmanager
def _empty_packages(root: Path, package: str) -> Iterator[None]:
    """Stand in for reasoning-gym and a package of it, which run no code, during the block.

    Nothing stays: a later import of reasoning-gym, as by a user's reward, has all families.
    """
    for name, folder in ((_NAME, root), (f"{_NAME}.{package}", root / package)):
        stand_in = ModuleType(name)
        stand_in.__path__ = [str(folder)]
        sys.modules[name] = stand_in
    try:
        yield
    finally:
        for name in [*sys.modules]:
            if name == _NAME or name.startswith(f"{_NAME}."):
                del sys.modules[name]
