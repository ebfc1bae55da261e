"""Reader of a record, in columns that a reader needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from ..errors import TrinityError
from .columns import SUMMARY_COLUMNS, build_schema, import_pyarrow
from .files import RECORD, RecordedStep, find_steps, list_names

TRAINED = "trained"
"""Fate of a sample that a step trained on."""
DISCARDED = "discarded"
"""Name of all fates of answers that no step trained on."""


class RecordMissing(TrinityError):
    """A run, a step or a sample is not in the record.

    Attributes:
        run_id: The run.
        fault: ``run`` if nothing is recorded, ``step``, ``ordinal`` or ``fate`` if that is not.
        folder: Folder of the record.
        step: The step.
        ordinal: The ordinal.
        recorded: First and last recorded step.
        fate: The fate.
    """

    run_id: str
    fault: Literal["run", "step", "ordinal", "fate"]
    folder: Path
    step: int | None = None
    ordinal: int | None = None
    recorded: tuple[int, int] | None = None
    fate: str | None = None
    texts: ClassVar = {
        "run": "run {run_id} has no recorded rollouts in {folder}: train with record.rollouts "
        "sample or all, or name another folder with --checkpoint-root",
        "step": "step {step} of run {run_id} is not recorded: the record has {_recorded}",
        "fate": "the record of run {run_id} has no answers of the fate {fate}{_step_clause}: see "
        "the fates of all tokens with trinity-events goodput {run_id}",
        "ordinal": "question {ordinal} is not among the recorded samples of step {step} of run "
        "{run_id}: see them with trinity-events samples {run_id} --step {step}",
    }

    @property
    def _step_clause(self) -> str:
        return "" if self.step is None else f" for step {self.step}"

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

    def list_steps(
        self, *, superseded: bool = False, discarded: bool = False
    ) -> list[RecordedStep]:
        """Return the recorded steps in the order of their training.

        Args:
            superseded: Include steps that a later epoch took again.
            discarded: Include steps that have discarded answers alone.
        """
        return [
            step
            for step in find_steps(list_names(self.folder))
            if (superseded or step.is_current) and (step.files or discarded)
        ]

    def find_step(self, step: int | None = None, *, discarded: bool = False) -> RecordedStep:
        """Return a current step, by default the newest one.

        Args:
            step: The step.
            discarded: Include steps that have discarded answers alone.

        Raises:
            RecordMissing: It is not recorded.
        """
        steps = self.list_steps(discarded=discarded)
        if not steps:
            raise RecordMissing(self.run_id, "run", self.folder)
        # From the newest: a folder may have one step of several epochs.
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
        discarded: bool = False,
    ) -> list[dict[str, Any]]:
        """Return samples of a step, ordered by ordinal and sample.

        Args:
            recorded: The step.
            columns: Columns to read; None reads all.
            ordinal: Only the samples of this question.
            sample: Only the samples of this number, one of each question.
            discarded: Samples that came for the step, and that no step trained on, instead.

        Raises:
            RecordDamaged: A file cannot be read.
        """
        numbers = {"ordinal": ordinal, "sample": sample}
        conditions = {name: value for name, value in numbers.items() if value is not None}
        lacking = dict.fromkeys(columns or self.column_names)
        rows: list[dict[str, Any]] = []
        for file in recorded.discarded if discarded else recorded.files:
            try:
                rows_of_file = _read_rows(self.folder / file.name, columns, conditions)
            except FileNotFoundError:
                continue  # the writer removed it as the oldest
            for row in rows_of_file:
                if "reward_parts" in row:
                    row["reward_parts"] = dict(row["reward_parts"] or ())
                rows.append(lacking | row)  # None for each column that is not in the file
        return sorted(rows, key=lambda row: (row["ordinal"], row["sample"]))

    def find_fate(
        self, fate: str, step: int | None = None, columns: Sequence[str] | None = SUMMARY_COLUMNS
    ) -> tuple[RecordedStep, list[dict[str, Any]]]:
        """Return the answers of a fate that came for a step, by default for the newest one.

        Args:
            fate: Reason for which no step trained on them; ``discarded`` for all of them.
            step: The step.
            columns: Columns to read, with ``fate`` among them; None reads all.

        Raises:
            RecordMissing: There are none.
        """
        for recorded in reversed(self.list_steps(discarded=True)):
            if step is not None and recorded.step != step:
                continue
            rows = self.read(recorded, columns, discarded=True)
            if fate != DISCARDED:
                rows = [row for row in rows if row["fate"] == fate]
            if rows:
                return recorded, rows
        raise RecordMissing(self.run_id, "fate", self.folder, step=step, fate=fate)

    def read_all(
        self, steps: Sequence[RecordedStep], columns: Sequence[str] | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yield the samples of several steps, and the answers that were discarded for them.

        The fate of both is ``superseded`` if a later epoch took the step again.
        """
        for recorded in steps:
            for discarded in (False, True):
                for row in self.read(recorded, columns, discarded=discarded):
                    fate = (row.get("fate") or TRAINED) if recorded.is_current else "superseded"
                    yield row | {"fate": fate}

    def find_time(self, recorded: RecordedStep) -> int:
        """Return the nanoseconds at which a step was recorded; 0 if its files are gone."""
        files = (*recorded.files, *recorded.discarded)
        paths = [self.folder / file.name for file in files]
        return max((path.stat().st_mtime_ns for path in paths if path.exists()), default=0)

    @property
    def column_names(self) -> list[str]:
        """Return the names of all columns."""
        return list(build_schema().names)


def _read_rows(
    path: Path, columns: Sequence[str] | None, conditions: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Return the rows of a file that meet the conditions.

    The calling thread alone reads, and from a file of Arrow's. `parquet.read_table` reads with
    Arrow's threads, which release the file after the call has returned. They hold the interpreter's
    lock for a file of Python: one that waits for it while the interpreter exits aborts the process
    (`test_a_record_is_read_by_the_calling_thread_alone`).

    Raises:
        RecordDamaged: The file cannot be read.
    """
    pa = import_pyarrow("the record of rollouts")
    rows: list[dict[str, Any]] = []
    try:
        with pa.parquet.ParquetFile(path, pre_buffer=False) as file:
            # A record of an earlier version lacks some.
            names = [name for name in file.schema_arrow.names if columns is None or name in columns]
            places = [
                place
                for place in range(file.num_row_groups)
                if not conditions
                or conditions
                in file.read_row_group(place, [*conditions], use_threads=False).to_pylist()
            ]
            # Together is faster, but Arrow cannot join the dictionaries of nested columns.
            is_nested = "token_texts" in names
            for batch in [[place] for place in places] if is_nested else [places]:
                table = file.read_row_groups(batch, names, use_threads=False)
                if conditions:
                    keys = table.select([*conditions]).to_pylist()
                    table = table.filter(pa.array([key == conditions for key in keys], pa.bool_()))
                rows += table.to_pylist()
    except (pa.ArrowException, OSError) as error:
        if getattr(error, "errno", None) is not None:
            raise  # of the file system: Arrow's own of a damaged page have no number
        raise RecordDamaged(path, " ".join(str(error).split())) from None
    return rows
