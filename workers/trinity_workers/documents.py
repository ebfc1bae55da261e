"""JSON Schemas of everything that a wheel describes: messages, and what commands print."""

from __future__ import annotations

from typing import Any

from trinity_events.views.documents import DOCUMENTS as BASE_DOCUMENTS
from trinity_events.views.documents import document_schema
from trinity_schemas.documents import format_document, message_documents

from .config.schema import add_meanings
from .config.train_config import TrainConfig
from .engines.convertible import Conversion
from .explorer.result import ExplorationResult
from .launch.evaluate import CheckpointEvaluation
from .launch.results import RunFailure
from .launch.summary import DemoSummary

DOCUMENTS: dict[str, Any] = BASE_DOCUMENTS | {
    "convert": Conversion,
    "demo": (DemoSummary, RunFailure),
    "evaluate": (CheckpointEvaluation, RunFailure),
    "explorer": ExplorationResult | None,
    "train": (DemoSummary, RunFailure),
    "train-check": TrainConfig,
}
"""Type of each document that a command prints with ``--json``, or types, by command and option."""


def schema_files() -> dict[str, str]:
    """Return the text of each file of the folder ``trinity_schemas/json`` of a wheel.

    The build runs this without extras, so nothing here imports torch.
    """
    schemas = {name: document_schema(document) for name, document in DOCUMENTS.items()}
    add_meanings(schemas["train-check"])  # The editor of a configuration shows them.
    commands = {
        f"commands/{name}.json": format_document(schema) for name, schema in schemas.items()
    }
    return message_documents() | commands
