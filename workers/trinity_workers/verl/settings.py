"""Settings of the weight transport, from veRL's configuration and the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

from trinity_schemas import RunTransport, check_run_id

from ..config.errors import BadSettings
from ..config.types import Positive

NAME = "trinity"
"""Name of the backend in veRL's configuration."""
TransportChoice = Literal["auto", RunTransport]


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``engine_kwargs`` of the backend, the same in every process of the trainer and the rollouts.

    Times are in seconds.
    """

    redis_url: str
    """URL of the log's server, which all of these processes can reach."""
    weights_url: str | None = None
    """URL of the chunks' server; the log's server if left out."""
    run_id: str | None = None
    """Id of the run; by default the trainer makes one up."""
    transport: TransportChoice = "auto"
    full_every: Positive = 1
    """Versions from one published in full to the next; the others are published as deltas."""
    deadline: Annotated[float, Meta(gt=0)] = 300.0
    """Maximum seconds to wait for weights, from the request on."""
    device: str | None = None
    """Device of a rollout's tensors; by default its accelerator, if it has one."""


class VerlSettingsRefused(BadSettings):
    """Options of the backend in veRL's configuration cannot be used.

    Attributes:
        fault: ``server`` without one, ``options`` if one is unknown or wrong, ``deltas`` if a
            collective group is to send them, ``run`` for a run id that is none.
        reason: What is wrong.
    """

    fault: Literal["server", "options", "deltas", "run"]
    reason: str = ""
    texts: ClassVar = {
        "server": f"veRL's backend {NAME!r} has no server: set engine_kwargs.{NAME}.redis_url in "
        "its configuration, or TRINITY_REDIS_URL in every process; trinity-events serve starts one",
        "options": f"engine_kwargs.{NAME} of veRL's configuration cannot be used: {{reason}}; it "
        f"may have {', '.join(Settings.__struct_fields__)}",
        "deltas": f"a collective group is sent full tensors, and engine_kwargs.{NAME}.full_every "
        "asks for deltas: leave that out, or choose another transport",
        "run": f"engine_kwargs.{NAME}.run_id cannot be used: {{reason}}",
    }


def parse_settings(options: Mapping[str, Any]) -> Settings:
    """Return the checked settings. Raises VerlSettingsRefused."""
    given = {name: value for name, value in options.items() if value is not None}
    for name, variable in (
        ("redis_url", "TRINITY_REDIS_URL"),
        ("weights_url", "TRINITY_WEIGHTS_REDIS_URL"),
    ):
        if name not in given and os.environ.get(variable):
            given[name] = os.environ[variable]
    if "redis_url" not in given:
        raise VerlSettingsRefused("server")
    try:
        settings = msgspec.convert(given, Settings)
    except msgspec.ValidationError as error:
        raise VerlSettingsRefused("options", str(error)) from None
    if settings.transport == "collective" and settings.full_every > 1:
        raise VerlSettingsRefused("deltas")
    if settings.run_id is not None:
        try:
            check_run_id(settings.run_id)
        except ValueError as error:
            raise VerlSettingsRefused("run", str(error)) from None
    return settings
