"""Errors of settings that cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from trinity_events.errors import TrinityError


def format_origin(origin: str) -> str:
    """Return the beginning of a sentence about a file or option; empty text without one."""
    return f"{origin}: " if origin else ""


class BadSettings(TrinityError):
    """A run's settings, from the user or from the log, are invalid."""

    # The same settings fail again: no supervisor need restart the command for them.
    is_lasting = True


class SeveralMistakes(BadSettings):
    """A run cannot start for several reasons.

    Attributes:
        mistakes: An error for each of them.
        fault: ``all`` to name each, ``first`` for the first and the number of the others.
    """

    mistakes: tuple[TrinityError, ...]
    fault: Literal["all", "first"] = "all"
    texts: ClassVar = {
        "all": "{_listed}",
        "first": "{mistakes[0]} ({_others} more: see --check)",
    }

    @property
    def _listed(self) -> str:
        # The command line writes `error:` before the first one alone.
        return "\nerror: ".join(map(str, self.mistakes))

    @property
    def _others(self) -> int:
        return len(self.mistakes) - 1


class UnknownSetting(BadSettings):
    """A configuration has a setting that there is not.

    Attributes:
        origin: File or option that gives it.
        name: Its name.
        nearest: Setting of the most similar name, if one is similar.
        hint: Clause about the setting of another project that has the name.
        sections: Sections that there are.
    """

    origin: str
    name: str
    nearest: str | None = None
    hint: str = ""
    sections: tuple[str, ...] = ()
    text = "{origin}: there is no setting {name}: {_way_out}"

    @property
    def _way_out(self) -> str:
        if self.nearest is not None:
            return f"is {self.nearest} meant?"
        return self.hint or f"the sections are {', '.join(self.sections)}"


class WrongValue(BadSettings):
    """A setting has a value that it does not take.

    Attributes:
        origin: File or option that gives it.
        name: Name of the setting, as it is given.
        value: The value, as JSON and shortened.
        allowed: Clause that says which values it takes.
        reason: Reason and way out for a value that another project has.
    """

    origin: str
    name: str
    value: str
    allowed: str
    reason: str = ""
    text = "{origin}: {name} is {value}, but must be {allowed}{_reason}"

    @property
    def _reason(self) -> str:
        return f": {self.reason}" if self.reason else ""


class NoSection(BadSettings):
    """A configuration has another value in the place of a section.

    Attributes:
        origin: File or option that gives it.
        fault: ``file`` if the whole file is none, ``section``, or ``name`` for one that no section
            may have.
        value: The value, or the name, as JSON and shortened.
        name: Name of the section; of the one around it for ``name``.
    """

    origin: str
    fault: Literal["file", "section", "name"]
    value: str
    name: str = ""
    texts: ClassVar = {
        "file": "{origin}: the file holds {value}, not sections",
        "section": "{origin}: {name} is {value}, but it is a section: write its fields below it",
        "name": "{origin}: {name} has {value}, but a name there has only lower-case letters, "
        "digits, - and _",
    }


class SettingsContradict(BadSettings):
    """Settings do not go together, by a rule of ``config/rules``.

    Attributes:
        settings: Their paths, with that of the wrong one first.
        values: Their values.
        sentence: Sentence of the rule, with the reason and the way out.
        origin: File that gives them; empty for those of a command line.
    """

    settings: tuple[str, ...]
    values: tuple[object, ...]
    sentence: str
    origin: str = ""
    text = "{_origin}{sentence}"

    @property
    def _origin(self) -> str:
        return format_origin(self.origin)


class PresetRefused(BadSettings):
    """A configuration names a preset that cannot be used.

    Attributes:
        origin: File that names it; empty for a command line.
        error: Error of the algorithms.
    """

    origin: str
    error: TrinityError
    text = "{_origin}algorithm.preset: {error}"

    @property
    def _origin(self) -> str:
        return format_origin(self.origin)


class ConfigUnreadable(BadSettings):
    """A configuration cannot be parsed.

    Attributes:
        origin: Its file, or the option that has it.
        fault: ``file`` if it cannot be read, ``ending`` if its name has another one, ``pyyaml`` if
            that is not installed, ``twice`` for a name that a section has twice. Else the format
            that it is not.
        reason: Error of the system or the parser.
        line: Line of the mistake.
        name: Name that is given twice.
    """

    origin: str
    fault: Literal["file", "TOML", "YAML", "ending", "pyyaml", "twice"]
    reason: str = ""
    line: int | None = None
    name: str = ""
    texts: ClassVar = {
        "file": "{origin} cannot be read: {reason}",
        "TOML": "{origin} is not TOML: {reason}",
        "YAML": "{origin} is not YAML{_line}: {reason}",
        "ending": "{origin} is neither .yaml, .yml nor .toml: give it such an ending",
        "pyyaml": "{origin} cannot be read without pyyaml: pip install 'trinity-events[workers]', "
        "or write it as TOML",
        "twice": "{origin}: {name} is given twice in the section at line {line}: leave one out",
    }

    @property
    def _line(self) -> str:
        return "" if self.line is None else f" at line {self.line}"


class BaseRefused(BadSettings):
    """A configuration cannot be laid over the base that it names.

    Attributes:
        file: File of the configuration.
        fault: ``path`` if the base is none, ``circle`` if it is among the files before it.
        base: The base.
        files: Files that are laid over each other, the first one first.
    """

    file: Path
    fault: Literal["path", "circle"]
    base: str
    files: tuple[Path, ...] = ()
    texts: ClassVar = {
        "path": "{file}: base is {base}, but must be the path of another configuration",
        "circle": "{_files} -> {base}: each is laid over the next: leave one out",
    }

    @property
    def _files(self) -> str:
        return " -> ".join(map(str, self.files))


class CommandRefused(BadSettings):
    """Options of a command contradict each other, or one is missing.

    Attributes:
        fault: ``start`` if a run is to start at two steps, ``run`` if it has neither a file nor a
            name, ``file`` for settings without a file to lay them over, ``setting`` for one that is
            none, ``device`` for one that there is not.
        setting: Text of the option.
    """

    fault: Literal["start", "run", "file", "setting", "device"]
    setting: str = ""
    texts: ClassVar = {
        "start": "--fresh begins at step 1, and --from-step resumes: give one of them",
        "run": "train needs a configuration file, or the name of a run by --run",
        "file": "--set {setting} is laid over a file, and there is none: give it by --config",
        "device": "--device is {setting}, but must be cpu, cuda or cuda:N",
        "setting": "--set {setting} is no setting: write section.field=value, such as --set "
        "sync.interval=2",
    }


class LoggedSettingsUnreadable(BadSettings):
    """The settings of a run in the log cannot be read.

    Attributes:
        reason: Error of the decoder.
        run_id: The run, if known.
    """

    reason: str
    run_id: str = ""
    text = (
        "the settings in the log{_run} cannot be read ({reason}): do all processes of the run have "
        "the same version of trinity-events?"
    )

    @property
    def _run(self) -> str:
        return f" of run {self.run_id}" if self.run_id else ""


class TransportNotChosen(BadSettings):
    """The launcher chose no transport of the weights.

    Attributes:
        run_id: The run.
    """

    run_id: str
    text = "no transport of the weights was chosen for run {run_id}"
