"""Hook of the build: a wheel has the JSON Schemas, which are generated from the structs."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

IN_WHEEL = "trinity_schemas/json"


class SchemasHook(BuildHookInterface[Any]):
    """Writer of the schemas into a wheel; an editable install has none."""

    PLUGIN_NAME = "schemas"
    _folder: str | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Generate the files, and have them included."""
        if version == "editable":
            return
        root = Path(self.root)
        sys.path[:0] = [str(root), str(root / "schemas"), str(root / "workers")]
        from trinity_workers.documents import schema_files

        self._folder = tempfile.mkdtemp()
        for name, text in schema_files().items():
            path = Path(self._folder, name)
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        build_data["force_include"][self._folder] = IN_WHEEL

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the files that are in the wheel now."""
        if self._folder is not None:
            shutil.rmtree(self._folder)
