"""Reader of a record, in columns that a reader needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from ..errors import TrinityError
from .columns import SUMMARY_COLUMNS, build_schema, import_pyarrow
from .files import RECORD, RecordedStep, find_steps, list_names


class RecordMissing(TrinityError):
    """A run, a step or a sample is not in the record.

    Attributes:
        run_id: The run.
        fault: ``run`` if nothing is recorded, ``step`` or ``ordinal`` if that is not.
        folder: Folder of the record.
        step: The step.
        ordinal: The ordinal.
        recorded: First and last recorded step.
    """

    run_id: str
    fault: Literal["run", "step", "ordinal"]
    folder: Path
    step: int | None = None
    ordinal: int | None = None
    recorded: tuple[int, int] | None = None
    texts: ClassVar = {
        "run": "run {run_id} has no recorded rollouts in {folder}: train with record.rollouts "
        "sample or all, or name another folder with --checkpoint-root",
        "step": "step {step} of run {run_id} is not recorded: the record has {_recorded}",
        "ordinal": "question {ordinal} is not among the recorded samples of step {step} of run "
        "{run_id}: see them with trinity-events samples {run_id} --step {step}",
    }

    @property
    def _recorded(self) -> str:
        if self.recorded is None:
            return "none"
        first, last = self.recorded
        return f"steps {first} to {last}"


class RecordDamaged(TrinityError):
    """A file of the record cannot be read.

    Attributes:
        path: The file.
        reason: Error of the reader.
    """

    path: Path
    reason: str
    text = "{path} is no readable file of a record ({reason}): remove it to read the others"


class RolloutRecord:
    """Record of a run.

    Args:
        run_folder: The run's directory.
        run_id: The run.
    """

    def __init__(self, run_folder: Path, run_id: str) -> None:
        self.folder = run_folder / RECORD
        self.run_id = run_id

    def list_steps(self, *, superseded: bool = False) -> list[RecordedStep]:
        """Return the recorded steps in the order of their training.

        Args:
            superseded: Include steps that a later epoch took again.
        """
        steps = find_steps(list_names(self.folder))
        return [step for step in steps if superseded or step.is_current]

    def find_step(self, step: int | None = None) -> RecordedStep:
        """Return a current step, by default the newest one.

        Raises:
            RecordMissing: It is not recorded.
        """
        steps = self.list_steps()
        if not steps:
            raise RecordMissing(self.run_id, "run", self.folder)
        for recorded in reversed(steps):
            if step is None or recorded.step == step:
                return recorded
        first, last = steps[0].step, steps[-1].step
        raise RecordMissing(self.run_id, "step", self.folder, step=step, recorded=(first, last))

    def read(
        self,
        recorded: RecordedStep,
        columns: Sequence[str] | None = SUMMARY_COLUMNS,
        *,
        ordinal: int | None = None,
        sample: int | None = None,
    ) -> list[dict[str, Any]]:
        """Return samples of a step, ordered by ordinal and sample.

        Args:
            recorded: The step.
            columns: Columns to read; None reads all.
            ordinal: Only the samples of this question.
            sample: Only the samples of this number, one of each question.

        Raises:
            RecordDamaged: A file cannot be read.
        """
        pa = import_pyarrow("the record of rollouts")
        conditions = {"ordinal": ordinal, "sample": sample}
        filters = [(name, "==", value) for name, value in conditions.items() if value is not None]
        rows: list[dict[str, Any]] = []
        for file in recorded.files:
            path = self.folder / file.name
            try:
                with path.open("rb") as source:
                    table = pa.parquet.read_table(
                        source,
                        columns=None if columns is None else [*columns],
                        filters=filters or None,
                    )
            except FileNotFoundError:
                continue  # the writer removed it as the oldest
            except pa.ArrowException as error:
                raise RecordDamaged(path, " ".join(str(error).split())) from None
            for row in table.to_pylist():
                if "reward_parts" in row:
                    row["reward_parts"] = dict(row["reward_parts"] or ())
                rows.append(row)
        return sorted(rows, key=lambda row: (row["ordinal"], row["sample"]))

    def read_all(
        self, steps: Sequence[RecordedStep], columns: Sequence[str] | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yield the samples of several steps, with a column ``fate``: trained or superseded."""
        for recorded in steps:
            fate = "trained" if recorded.is_current else "superseded"
            for row in self.read(recorded, columns):
                yield row | {"fate": fate}

    def find_time(self, recorded: RecordedStep) -> int:
        """Return the nanoseconds at which a step was recorded; 0 if its files are gone."""
        paths = [self.folder / file.name for file in recorded.files]
        return max((path.stat().st_mtime_ns for path in paths if path.exists()), default=0)

    @property
    def column_names(self) -> list[str]:
        """Return the names of all columns."""
        return list(build_schema().names)
