"""Former names of settings, for files, the command line and configurations in the log.

1. A former name has the type, the default and the meaning of the current one.
2. A setting keeps its section: only the last part of its path differs.
3. A configuration has one of the two names; both are refused, even with the same value.
4. Former names in files and on the command line are reported to the user. Those in the log are
   not: its reader cannot change them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import BadSettings

RENAMED: dict[str, str] = {
    "trainer.ramp_steps": "trainer.warmup_steps",
    "trainer.gradient_norm": "trainer.max_grad_norm",
    # `warmup_steps` is the field's word for the learning rate, and was one for two things here.
    "algorithm.critic.warmup_steps": "algorithm.critic.critic_warmup_steps",
}
"""Former paths of settings, and the current ones."""


class SettingNamedTwice(BadSettings):
    """Raised if a configuration has a setting by two names.

    Attributes:
        path: Current path of the setting.
        names: Both names.
    """

    def __init__(self, path: str, names: tuple[str, str]) -> None:
        super().__init__(
            f"{names[0]} and {names[1]} are two names of one setting: write {path} alone"
        )
        self.path = path
        self.names = names


def to_current_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration of the log, sections in one another, with the current names.

    Raises:
        SettingNamedTwice: One setting has both of its names.
    """
    current = dict(values)
    for former, path in RENAMED.items():
        *keys, former_name = former.split(".")
        section = _copy_section(current, keys)
        if section is None or former_name not in section:
            continue
        name = path.rpartition(".")[2]
        if name in section:
            raise SettingNamedTwice(path, (former, path))
        section[name] = section.pop(former_name)
    return current


def _copy_section(values: dict[str, Any], keys: list[str]) -> dict[str, Any] | None:
    """Replace nested sections by copies, and return the last; None if one is absent."""
    for key in keys:
        section = values.get(key)
        if not isinstance(section, dict):
            return None
        values[key] = dict(section)
        values = values[key]
    return values
