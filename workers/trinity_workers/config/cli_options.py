"""Command-line options that are laid over the configuration file of the package."""

from __future__ import annotations

from functools import cache
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from msgspec import inspect as types

from .fields import Field, fields
from .files import Reading, SettingOverride, read_config
from .train_config import TrainConfig

SHIPPED_FILE = Path(__file__).with_name("demo.toml")
OPTIONS = {
    "--steps": "steps",
    "--explorers": "explorer.count",
    "--trainers": "trainer.ranks",
    "--sync-style": "sync.style",
    "--sync-interval": "sync.interval",
    "--max-staleness": "sync.max_staleness",
    "--save-interval": "checkpoints.interval",
    "--save-strategy": "checkpoints.strategy",
    "--sync": "sync.method",
    "--weights": "sync.transport",
    "--publish": "sync.publish",
    "--weights-full-every": "sync.full_every",
    "--proof": "explorer.proof",
    "--learning-rate": "trainer.learning_rate",
    "--seed": "seed",
    "--engine": "trainer.engine",
    "--tensor-parallel": "trainer.tensor_parallel",
    "--pipeline-parallel": "trainer.pipeline_parallel",
}
"""Options of ``demo`` and ``trainer``, and the fields that they set."""
# Messages name what the user typed, and not the field.
_NAMES = {path: option for option, path in OPTIONS.items()}


def overlay_parameters() -> list[Parameter]:
    """Return the options as parameters, with type, bounds, help and default of their fields."""
    return [_parameter(option, fields()[path]) for option, path in OPTIONS.items()]


def overlaid(given: dict[str, Any]) -> tuple[Reading, dict[str, Any]]:
    """Lay options over the shipped file; returns the configuration and all other options."""
    rest = dict(given)
    # An option that is left out is None, and the file decides.
    settings = [
        SettingOverride(path, value, option)
        for option, path in OPTIONS.items()
        if (value := rest.pop(_identifier(option))) is not None
    ]
    return read_config(SHIPPED_FILE, settings, named=lambda path: _NAMES.get(path, path)), rest


@cache
def _shipped() -> TrainConfig:
    return read_config(SHIPPED_FILE).checked()


def _identifier(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


def _parameter(option: str, field: Field) -> Parameter:
    # The shipped file's values, which differ from those of the types: it is what runs.
    default: Any = _shipped()
    for name in field.path.split("."):
        default = getattr(default, name)
    kind = field.kind
    bounds: dict[str, Any] = {}
    if isinstance(kind, types.IntType | types.FloatType):
        # typer's bounds are closed; open ones are found as the configuration is read.
        bounds = {"min": kind.ge, "max": kind.le}
    shown = typer.Option(option, help=field.meaning, show_default=default is not None, **bounds)
    return Parameter(
        _identifier(option),
        Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[_annotation(field), shown],
    )


def _annotation(field: Field) -> Any:
    match field.kind:
        case types.IntType():
            plain: Any = int
        case types.FloatType():
            plain = float
        case types.BoolType():
            plain = bool
        case _:
            plain = Literal[field.choices] if field.choices else str
    return plain | None if field.optional else plain
