"""Timelines as Perfetto traces (TrackEvent), which ui.perfetto.dev opens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, BinaryIO

from ..analysis.spans import Span
from ..analysis.timeline import Moment, Part, Value
from ..errors import PackageMissing

# There is one writer; packets of one sequence are in its order.
_SEQUENCE = 1
_ROOT = 1


class PerfettoTrace:
    """Writer of a trace: a track for the run, below it one for each process and each lane.

    Args:
        run_id: The run.
        file: File that packets are written to, one by one.

    Raises:
        PackageMissing: if the package perfetto is not installed.
    """

    def __init__(self, run_id: str, file: BinaryIO) -> None:
        try:
            from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos
            from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder
        except ImportError:
            raise PackageMissing("a trace", "perfetto", "trinity-events[perfetto]") from None
        self._event: Any = protos.TrackEvent
        self._builder = StreamingTraceProtoBuilder(file)
        self._tracks: dict[tuple[str, ...], int] = {}
        self.spans = 0
        """Number of spans that were written."""
        self._write_track(_ROOT, f"run {run_id}", None)

    def add_all(self, parts: Iterable[Part]) -> None:
        """Write parts of a timeline."""
        for part in parts:
            self.add(part)

    def add(self, part: Part) -> None:
        """Write one part."""
        match part:
            case Span():
                self._span(part)
            case Moment():
                track = self._track(part.process)
                packet = self._packet(part.at, track, self._event.TYPE_INSTANT)
                packet.track_event.name = part.name
                _annotate(packet.track_event, part.facts)
                self._write(packet)
            case Value():
                packet = self._packet(
                    part.at, self._track("", part.counter), self._event.TYPE_COUNTER
                )
                packet.track_event.double_counter_value = part.value
                self._write(packet)

    def _span(self, span: Span) -> None:
        self.spans += 1
        track = self._track(span.process, span.lane)
        packet = self._packet(span.begin, track, self._event.TYPE_SLICE_BEGIN)
        event = packet.track_event
        event.name = span.name
        event.categories.append(span.category)
        event.flow_ids.extend(span.flows)
        if span.flow_end is not None:
            event.terminating_flow_ids.append(span.flow_end)
        _annotate(event, span.facts)
        self._write(packet)
        self._write(self._packet(span.end, track, self._event.TYPE_SLICE_END))

    def _track(self, *names: str) -> int:
        """Return the track of a process, of its lane, or of a counter; describe a new one."""
        track = self._tracks.get(names)
        if track is not None:
            return track
        # Counters are of the run, and of no process.
        counter = names[0] == ""
        parent = _ROOT if counter or len(names) == 1 else self._track(names[0])
        number = self._tracks[names] = len(self._tracks) + _ROOT + 1
        self._write_track(number, names[-1], parent, counter=counter)
        return number

    def _write_track(
        self, number: int, name: str, parent: int | None, *, counter: bool = False
    ) -> None:
        packet = self._builder.create_packet()
        track = packet.track_descriptor
        track.uuid, track.name = number, name
        if parent is not None:
            track.parent_uuid = parent
        if counter:
            # An empty message is only there once it is set so (protobuf).
            track.counter.SetInParent()
        self._write(packet)

    def _packet(self, at: int, track: int, kind: int) -> Any:
        packet = self._builder.create_packet()
        # The field is unsigned: a duration that a log has wrong must not end the export.
        packet.timestamp = max(0, at)
        packet.trusted_packet_sequence_id = _SEQUENCE
        packet.track_event.type = kind
        packet.track_event.track_uuid = track
        return packet

    def _write(self, packet: Any) -> None:
        self._builder.write_packet(packet)


def _annotate(event: Any, facts: dict[str, str | int]) -> None:
    for name, value in facts.items():
        note = event.debug_annotations.add()
        note.name = name
        if isinstance(value, int):
            note.int_value = value
        else:
            note.string_value = value
