"""Rollout engines by name: those that ship, and entry points."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from trinity_events.errors import PackageMissing
from trinity_schemas import PauseMode

from ..rules import format_list
from ..tasks.objects import load_object
from .base import (
    SAMPLING_SETTINGS,
    AdaptersNotSupported,
    EngineOptions,
    RolloutEngine,
    RolloutEngineError,
    UpdateModeNotSupported,
)

ENGINES = {
    "huggingface": "trinity_workers.rollout_engines.huggingface:HuggingFaceEngine.open",
    "vllm": "trinity_workers.rollout_engines.vllm.engine:VLLMEngine.open",
    "vllm-server": "trinity_workers.rollout_engines.vllm.server:VLLMServerEngine.open",
}
"""Engines that ship with this package."""
_PACKAGES = {"vllm": ("vllm", "trinity-events[vllm]")}
"""Package that an engine which ships needs beside those of the workers, and what brings it."""
GROUP = "trinity_events.rollout_engines"
"""Group of entry points under which packages offer engines: functions of :class:`EngineOptions`."""
_MODES = "pause_modes"
"""Attribute of such a function; its value are the modes that its engine knows besides `wait`."""
_ADAPTERS = "adapters"
"""Attribute of such a function; True if its engine applies versions of adapters."""
_OPTIONS = "read_options"
"""Attribute of such a function; its value reads the options of its engine, and refuses others."""
_SAMPLING = "sampling_settings"
"""Attribute of such a function; its value are the sampling settings that its engine honours."""

P = ParamSpec("P")
E = TypeVar("E")
Make = Callable[[EngineOptions], RolloutEngine]


def updates_amid_turns(*modes: PauseMode) -> Callable[[Callable[P, E]], Callable[P, E]]:
    """Decorate a function that makes an engine which takes a version amid turns, in these modes.

    An engine whose function is not decorated only waits for the end of its turns.
    """

    def decorate(make: Callable[P, E]) -> Callable[P, E]:
        # On the function, so that a run is checked before an engine is made.
        setattr(make, _MODES, modes)
        return make

    return decorate


def applies_adapters(make: Callable[P, E]) -> Callable[P, E]:
    """Decorate a function that makes an engine whose versions may be of adapters alone."""
    setattr(make, _ADAPTERS, True)
    return make


def samples_with(*settings: str) -> Callable[[Callable[P, E]], Callable[P, E]]:
    """Decorate a function that makes an engine which honours some of :data:`SAMPLING_SETTINGS`.

    An engine whose function is not decorated honours the temperature, the seed and the limit of
    tokens. Log-probabilities must be those of the distribution that the settings leave.
    """
    assert set(settings) <= set(SAMPLING_SETTINGS), settings

    def decorate(make: Callable[P, E]) -> Callable[P, E]:
        setattr(make, _SAMPLING, settings)
        return make

    return decorate


def reads_options(
    read: Callable[[Mapping[str, Any]], object],
) -> Callable[[Callable[P, E]], Callable[P, E]]:
    """Decorate a function whose engine has options, which a run checks before it starts.

    An engine whose function is not decorated checks its options by itself.
    """

    def decorate(make: Callable[P, E]) -> Callable[P, E]:
        setattr(make, _OPTIONS, read)
        return make

    return decorate


class SamplingNotSupported(RolloutEngineError):
    """A run has sampling settings that its rollout engine does not honour.

    Attributes:
        engine: The engine.
        settings: Settings that it lacks.
        supported: Settings that it has.
    """

    engine: str
    settings: tuple[str, ...]
    supported: tuple[str, ...]
    text = (
        "rollouts or an evaluation set has {_settings}, which the rollout engine {engine} does not "
        "honour (it has {_supported}): leave it out, or choose another explorer.engine"
    )

    @property
    def _settings(self) -> str:
        return format_list(self.settings)

    @property
    def _supported(self) -> str:
        return format_list(("temperature", "max_new_tokens", *self.supported))


def check_installed(name: str) -> None:
    """Raise PackageMissing if the package of an engine that ships is not installed here."""
    if name in _PACKAGES:
        package, requirement = _PACKAGES[name]
        # Found and not imported: vLLM takes ten seconds to import.
        if find_spec(package) is None:
            raise PackageMissing(f"the rollout engine {name}", package, requirement)


def load_engine(name: str, options: EngineOptions, *, folder: Path = Path()) -> RolloutEngine:
    """Return a rollout engine.

    Args:
        name: An engine that ships, an entry point, `module:attribute` or `./file.py:attribute`.
        options: Options of the engine.
        folder: Directory that a relative name starts from.

    Raises:
        PackageMissing: It needs a package that is not installed.
        TaskError: There is none of that name.
        RolloutEngineError: It cannot treat unfinished turns as the options ask, or adapters, or
            does not honour a sampling setting.
    """
    check_installed(name)
    make = find_engine(
        name,
        options.pause_mode,
        adapters=options.lora.rank > 0,
        sampling_settings=options.sampling_settings,
        folder=folder,
    )
    return make(options)


def find_engine(
    name: str,
    pause_mode: PauseMode = "wait",
    *,
    adapters: bool = False,
    sampling_settings: Collection[str] = (),
    options: Mapping[str, Any] | None = None,
    folder: Path = Path(),
) -> Make:
    """Return the function that makes an engine; arguments and errors as :func:`load_engine`.

    Options that are given are checked too.
    """
    make: Make = load_object(
        name, kind="rollout engine", group=GROUP, built_in=ENGINES, folder=folder
    )
    modes: tuple[PauseMode, ...] = ("wait", *getattr(make, _MODES, ()))
    if pause_mode not in modes:
        raise UpdateModeNotSupported(name, pause_mode, modes)
    if adapters and not getattr(make, _ADAPTERS, False):
        raise AdaptersNotSupported(name)
    supported: tuple[str, ...] = getattr(make, _SAMPLING, ())
    lacking = tuple(
        setting
        for setting in SAMPLING_SETTINGS
        if setting in sampling_settings and setting not in supported
    )
    if lacking:
        raise SamplingNotSupported(name, lacking, supported)
    if options is not None and hasattr(make, _OPTIONS):
        getattr(make, _OPTIONS)(options)
    return make
