"""Savings and costs of delta versions."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch

from trinity_events.server import EmbeddedServer
from trinity_events.weights import ChunkStore, PartRef, PartWriter, PublishedPartReport
from trinity_events.weights.applying.deltas import InstalledBases
from trinity_events.weights.applying.install import check_fit, install
from trinity_events.weights.deltas.tracker import LastPublished
from trinity_events.weights.reading.pull import pull_version

from .environment import Stage
from .measure import Findings, Noise, Row, median, ratio, say, spread, taking_turns
from .policy_steps import Learning, policy_steps
from .report import PERFORMANCE
from .weights_peer import Model, announced, store_of

TITLE = "weights of which only what changed is published"
PLACE = PERFORMANCE
RUN = "bench-weights-delta"
_ENDS = count()
"""Numbers of runs: each pair of ends has its own."""
SHARES = (0.001, 0.01, 0.03, 1.0)
FULL_EVERY = 16
_MEBIBYTE = 1 << 20

Tensors = dict[str, torch.Tensor]


class Size(NamedTuple):
    """Models, rounds, versions of a chain, steps of the policy, and the expected duration."""

    models: tuple[tuple[str, Model], ...]
    rounds: int
    chain: int
    steps: int
    takes: str


SIZES = {
    "tiny": Size((("1 MiB in 20 tensors", Model(20, 26_214)),), 2, 4, 2, "20 s"),
    "small": Size((("64 MiB in 200 tensors", Model(200, 167_772)),), 5, 32, 30, "1 min"),
    "full": Size(
        (
            ("64 MiB in 200 tensors", Model(200, 167_772)),
            ("512 MiB in 200 tensors", Model(200, 1_342_177)),
        ),
        10,
        64,
        100,
        "5 min",
    ),
}


class Timed(NamedTuple):
    """Seconds until published and until applied, and the transferred bytes."""

    publish: float
    all: float
    bytes: int


class Ends:
    """Publisher and reader of one rank's consecutive versions, with a model at the reader.

    Args:
        transport: Name of the transport.
        url: URL of the chunks' server.
        like: Tensors with the names, shapes and dtypes of the versions.
    """

    def __init__(self, transport: str, url: str, like: Tensors) -> None:
        self.near: ChunkStore = store_of(transport, url)
        self.far: ChunkStore = store_of(transport, url)
        self.last = LastPublished(FULL_EVERY)
        self.module = torch.nn.ParameterDict(
            {name: torch.zeros_like(tensor) for name, tensor in like.items()}
        )
        self.installed = InstalledBases()
        self._run = f"{RUN}-{next(_ENDS)}"
        self._steps = count()
        self._there: list[PartRef] = []

    def sync(self, tensors: Tensors, *, delta: bool) -> Timed:
        """Publish the tensors, in full or as a delta, and apply them."""
        part = PartRef(self._run, 1, next(self._steps), 0)
        began = time.perf_counter()
        if delta:
            self.last.begin(part, self._there.__contains__)
        writer = PartWriter(self.near, part, last=self.last if delta else None)
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        report = writer.seal()
        published = time.perf_counter() - began
        ready = announced(part, report)
        have = self.installed.fulls(self.module)
        with pull_version(self.far, self._run, ready, have=have) as version:
            install(check_fit(self.module, version))
            self.installed.record(self.module, ready, version)
        applied = time.perf_counter() - began
        self._retire(part, report)
        return Timed(published, applied, report.bytes)

    def _retire(self, part: PartRef, report: PublishedPartReport) -> None:
        """Retire all versions but this one and its base."""
        base = part._replace(step=report.delta.base.step) if report.delta else part
        for previous in self._there:
            if previous != base:
                self.near.delete(previous)
        self._there = [base, part]

    def check(self, tensors: Tensors) -> None:
        """Raise an error unless the model has these tensors."""
        for name, tensor in tensors.items():
            parameter = self.module[name].detach()
            if parameter.dtype != tensor.dtype or not torch.equal(parameter, tensor):  # noqa: TID251
                raise RuntimeError(f"{name} was not applied as it was published")

    def close(self) -> None:
        """Delete the published versions."""
        for part in self._there:
            self.near.delete(part)
        self.far.close()
        self.near.close()


def run(on: Stage, size: Size, noise: Noise) -> Findings:
    """Measure each model, share and transport; then chains; then the demo's own policy."""
    rows: list[Row] = []
    with EmbeddedServer(on.folder, "weights", durable=False).attached() as url:
        for name, model in size.models:
            for share in SHARES:
                say(f"  {name}, {share:.1%} changed")
                rows += shared(name, model, share, url, size.rounds, noise)
        name, model = size.models[0]
        rows += [chained(name, model, share, url, size.chain) for share in SHARES[:-1]]
        learns = find_spec("transformers") is not None and find_spec("reasoning_gym") is not None
        if learns:
            rows += learned(url, size.steps)
    return Findings(rows, notes_of(size, learns=learns))


def shared(name: str, model: Model, share: float, url: str, rounds: int, noise: Noise) -> list[Row]:
    """Measure one model of which a share of the elements changes between versions."""
    tensors = random_tensors(model)
    generator = torch.Generator().manual_seed(1)
    rows: list[Row] = []
    for transport in ("shm", "redis"):
        with ends(transport, url, tensors) as full, ends(transport, url, tensors) as delta:

            def in_full(full: Ends = full) -> Timed:
                change(tensors, share, generator)
                return full.sync(tensors, delta=False)

            def changed(delta: Ends = delta) -> Timed:
                delta.last.forget()
                delta.sync(tensors, delta=True)
                change(tensors, share, generator)
                timed = delta.sync(tensors, delta=True)
                delta.check(tensors)
                return timed

            contenders: dict[str, Callable[[], Timed]] = {"full": in_full, "delta": changed}
            for contender in contenders.values():
                contender()
            timings = taking_turns(contenders, rounds, noise)
        rows += rows_of(f"{name}, {share:.1%} changed", transport, timings)
    return rows


def rows_of(what: str, transport: str, timings: dict[str, list[Timed]]) -> list[Row]:
    """Return rows of bytes, which no transport changes, and of times."""
    full, delta = timings["full"], timings["delta"]
    rows = []
    if transport == "shm":
        rows.append(
            bytes_row(what, [timed.bytes for timed in delta], [timed.bytes for timed in full])
        )
    for part, ours, theirs in (
        ("applied", [timed.all for timed in delta], [timed.all for timed in full]),
        (
            "published (the stall)",
            [timed.publish for timed in delta],
            [timed.publish for timed in full],
        ),
    ):
        rows.append(
            Row(
                what=f"{what}, {part} by {transport}",
                figure=f"{median(ours) * 1000:,.1f} ms",
                peer="in full",
                peer_figure=f"{median(theirs) * 1000:,.1f} ms",
                ratio=ratio(theirs, ours),
                spread=spread(ours),
            )
        )
    return rows


def bytes_row(what: str, ours: list[int], theirs: list[int]) -> Row:
    """Return the row of the mean bytes of a version."""
    mean, full = sum(ours) / len(ours), sum(theirs) / len(theirs)
    return Row(
        what=f"{what}, bytes of a version",
        figure=f"{mean / _MEBIBYTE:,.3f} MiB",
        peer="in full",
        peer_figure=f"{full / _MEBIBYTE:,.3f} MiB",
        ratio=full / mean,
    )


def chained(name: str, model: Model, share: float, url: str, versions: int) -> Row:
    """Publish a chain of versions with its full ones, as a run would."""
    say(f"  {name}, a chain with {share:.1%} changed from one to the next")
    tensors, generator = random_tensors(model), torch.Generator().manual_seed(2)
    sizes: list[int] = []
    with ends("shm", url, tensors) as both:
        for _ in range(versions):
            change(tensors, share, generator)
            sizes.append(both.sync(tensors, delta=True).bytes)
        both.check(tensors)
    what = f"{name}, {versions} versions with {share:.1%} changed from one to the next"
    return bytes_row(what, sizes, [model.nbytes])


def learned(url: str, steps: int) -> list[Row]:
    """Measure the demo's policy over its GRPO steps, unchanged and as bf16."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for rate in (5e-4, 1e-6):
            say(f"  {steps} GRPO steps of the demo's policy at a learning rate of {rate:g}")
            rows += learned_at(url, policy_steps(Path(folder), steps, rate), steps, rate)
    return rows


def learned_at(url: str, learning: Learning, steps: int, rate: float) -> list[Row]:
    """Measure one learning rate."""
    rows = []
    sizes_by_dtype: dict[torch.dtype, list[int]] = {torch.float32: [], torch.bfloat16: []}
    moved: dict[torch.dtype, list[float]] = {dtype: [] for dtype in sizes_by_dtype}
    before: dict[torch.dtype, Tensors] = {}
    ends_of: dict[torch.dtype, Ends] = {}
    try:
        for tensors in learning:
            for dtype, sizes in sizes_by_dtype.items():
                cast = {name: tensor.to(dtype, copy=True) for name, tensor in tensors.items()}
                if dtype not in ends_of:
                    ends_of[dtype] = Ends("shm", url, cast)
                else:
                    moved[dtype].append(share_changed(before[dtype], cast))
                before[dtype] = cast
                sizes.append(ends_of[dtype].sync(cast, delta=True).bytes)
                ends_of[dtype].check(cast)
    finally:
        for ends_of_dtype in ends_of.values():
            ends_of_dtype.close()
    for dtype, sizes in sizes_by_dtype.items():
        whole = sum(tensor.nbytes for tensor in before[dtype].values())
        name = str(dtype).removeprefix("torch.")
        what = f"the demo's policy in {name}, {steps} GRPO steps at {rate:g} "
        what += f"({median(moved[dtype]):.1%} changed a step)"
        rows.append(bytes_row(what, sizes, [whole]))
    return rows


def share_changed(before: Tensors, after: Tensors) -> float:
    """Return the share of all elements whose bits differ."""
    signed = {2: torch.int16, 4: torch.int32}
    changed = total = 0
    for name, tensor in after.items():
        bits = signed[tensor.element_size()]
        changed += int((tensor.view(bits) != before[name].view(bits)).sum())
        total += tensor.numel()
    return changed / total


def random_tensors(model: Model) -> Tensors:
    """Return weights of an untrained model: normally distributed, bf16."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: (torch.randn(tensor.shape, generator=generator) * 0.02).bfloat16()
        for name, tensor in model.parameters().items()
    }


def change(tensors: Tensors, share: float, generator: torch.Generator) -> None:
    """Change the last bit of a share of the elements, at random places.

    If a place was drawn twice, the share is slightly smaller.
    """
    for tensor in tensors.values():
        bits = tensor.view(torch.int16)
        if share >= 1:
            bits ^= 1
        else:
            elements = max(1, round(share * tensor.numel()))
            bits[torch.randint(tensor.numel(), (elements,), generator=generator)] ^= 1


@contextmanager
def ends(transport: str, url: str, like: Tensors) -> Iterator[Ends]:
    """Yield both ends, and close them after the block."""
    made = Ends(transport, url, like)
    try:
        yield made
    finally:
        with suppress(ConnectionError):
            made.close()


def notes_of(size: Size, *, learns: bool) -> list[str]:
    """Return the notes for readers of the figures."""
    notes = [
        "Ratios are of the full version over the delta, of bytes or of seconds: above 1, the delta "
        f"is smaller or faster. Tensors are bf16, changed at random places; rounds: {size.rounds}.",
        "Both ends are in one process and take turns, as they do in a run: a version is applied "
        "once it is announced. A delta was published right after a full version. What is applied "
        "is compared with what was published, outside of the time.",
        "The far end digests every tensor as it will be before it changes any; of a full version "
        "it digests the chunks.",
        "Chains and the policy's steps have their full versions in them, as the rule places them: "
        f"one of {FULL_EVERY} at least, and whenever the deltas since the last took as many bytes.",
    ]
    if not learns:
        notes.append("The demo's policy was left out: transformers or reasoning-gym is missing.")
    return notes
