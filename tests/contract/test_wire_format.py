"""The contract: what is on the wire, and what a reader refuses."""

import re
from contextlib import nullcontext

import msgspec
import numpy as np
import pytest
import torch

from tests.support.errors import raises, raises_from
from tests.support.event_histories import DIGEST, History, finished, part
from tests.support.rollout_messages import PROMPT, REQUEST, as_lists, experience, policy
from trinity_schemas import (
    MAX_EVENT_BYTES,
    ArrayDamaged,
    ArrayValuesRefused,
    Chunk,
    ContractError,
    EncodedManifest,
    EnvelopeReader,
    ExperienceContradiction,
    ExperienceUnreadable,
    LedgerContradiction,
    LedgerRestored,
    MalformedRunId,
    ManifestContradiction,
    MessageTooLarge,
    MessageUndecodable,
    MessageUnencodable,
    PartBase,
    Producer,
    RangesOverlap,
    ResumeContradiction,
    RolloutsDispatched,
    RunClosed,
    RunKeys,
    RunResumed,
    StepCommitted,
    StepReady,
    StepRef,
    StepTrained,
    TensorEntry,
    TokenArray,
    TrainedLedger,
    Turn,
    UnknownEventType,
    WeightManifest,
    check_run_id,
    chunk_key,
    decode_envelope,
    decode_experience,
    decode_manifest,
    decode_request,
    encode,
    encode_entries,
    event_tag,
    manifest_key,
    share_prompts,
    to_json,
)


def envelope(event=None):
    history = History()
    history.add(event or finished(3))
    return history.entries[-1][1]


def changed(**fields):
    return msgspec.msgpack.encode({**to_json(envelope()), **fields})


def test_an_event_survives_the_wire():
    for event in (finished(3, path="a/b"), part(4), StepCommitted(step=1, kind="weights")):
        sent = envelope(event)
        assert decode_envelope(encode(sent)) == sent


def test_tags_are_kebab_case():
    assert event_tag(StepReady) == "step-ready"
    assert to_json(envelope(part(1)))["event"]["type"] == "version-part-published"


def test_unknown_fields_are_ignored():
    raw = to_json(envelope())
    raw["later"] = {"deep": [1, 2]}
    raw["event"]["later"] = 1
    assert decode_envelope(msgspec.msgpack.encode(raw)) == envelope()


def test_unknown_event_types_are_told_apart_from_broken_ones():
    with raises(UnknownEventType, tag="from-the-future"):
        decode_envelope(changed(event={"type": "from-the-future"}))
    with raises(
        MessageUndecodable, expected="an event envelope", reason=re.compile("Expected `int`")
    ):
        decode_envelope(changed(epoch="one"))


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", b"not msgpack at all", encode(envelope())[:-3], b"\x81\xa1a" * 100_000],
    ids=["empty", "reserved byte", "text", "truncated", "deeply nested"],
)
def test_foreign_bytes_are_refused(payload):
    with pytest.raises(ContractError):
        decode_envelope(payload)


def spliced(*fields):
    """An envelope with these fields before its own, as they come, also twice."""
    names = ("run_id", "epoch", "producer", "sequence", "occurred_at", "event")
    pairs = [*fields, *((name, to_json(envelope())[name]) for name in names)]
    pack = msgspec.msgpack.encode
    return bytes([0x80 + len(pairs)]) + b"".join(pack(name) + pack(value) for name, value in pairs)


STRANGER = {"role": "no slug", "rank": 0, "node": "n", "incarnation": "i"}
UNUSUAL = {
    "the usual": spliced(),
    "a trace": spliced(("trace", {"traceparent": "00-1"})),
    "an unknown field": spliced(("later", 1)),
    "another sender": changed(producer={**STRANGER, "role": "worker"}),
    "a sender that is no sender": changed(producer=STRANGER),
    "another run": changed(run_id="another"),
    "a run that is no slug": changed(run_id="no slug"),
    "two senders": spliced(("producer", STRANGER)),
    "two runs": spliced(("run_id", "no slug")),
    "an event twice": spliced(("event", {"type": "run-closed", "reason": "finished"})),
    "no event": msgspec.msgpack.encode({"run_id": "r"}),
    "an unknown event": changed(event={"type": "from-the-future"}),
    "a broken sequence": changed(sequence=0),
    "text": b"not msgpack at all",
    "nothing": b"",
    "too much": spliced() + b" " * MAX_EVENT_BYTES,
    "too much of the usual": changed(event={**to_json(finished(3)), "more": "m" * MAX_EVENT_BYTES}),
}


def outcome(decode, payload):
    try:
        return decode(payload)
    except ContractError as error:
        return type(error), str(error), getattr(error, "sender", None)


@pytest.mark.parametrize("payload", UNUSUAL.values(), ids=UNUSUAL)
def test_a_reader_that_knows_the_sender_says_what_one_says_that_does_not(payload):
    reader = EnvelopeReader(most=1)
    for _ in range(2):
        assert outcome(reader.decode, spliced()) == envelope()
        assert outcome(reader.decode, payload) == outcome(decode_envelope, payload)


def test_a_reader_keeps_no_senders_that_are_large():
    reader = EnvelopeReader()
    raw = to_json(envelope())
    raw["producer"]["more"] = "m" * 100_000
    assert reader.decode(msgspec.msgpack.encode(raw)) == envelope()
    assert not reader._met
    largest = Producer(role="r" * 127, rank=2**31, node="\U0001f600" * 256, incarnation="i" * 127)
    reader.decode(encode(msgspec.structs.replace(envelope(), producer=largest)))
    assert len(reader._met) == 1


def test_an_oversized_event_is_refused_by_its_sender_and_by_its_readers():
    big = StepCommitted(step=1, kind="weights", metrics={f"m{i}": 1.0 for i in range(400_000)})
    with raises(MessageTooLarge, limit=MAX_EVENT_BYTES):
        encode(envelope(big))
    with raises(MessageTooLarge, size=MAX_EVENT_BYTES + 1, limit=MAX_EVENT_BYTES):
        decode_envelope(b"\x00" * (MAX_EVENT_BYTES + 1))


def test_text_that_is_none_is_refused_by_its_sender():
    with raises(MessageUnencodable, message="RunClosed", fault="text", reason="a\udcff"):
        encode(envelope(RunClosed(reason="failed", error="a\udcff")))


@pytest.mark.parametrize("number", [np.int64(1), np.float32(1), torch.ones(1)])
def test_a_tensor_for_a_number_is_refused_by_its_sender(number):
    with raises(MessageUnencodable, message="StepCommitted", fault="value"):
        encode(envelope(StepCommitted(step=1, kind="weights", metrics={"loss": number})))


@pytest.mark.parametrize("step", [-1, 2**60, 1.5, "7"])
def test_an_impossible_step_is_refused(step):
    raw = to_json(envelope())
    raw["event"]["slot"]["step"] = step
    with pytest.raises(ContractError):
        decode_envelope(msgspec.msgpack.encode(raw))


@pytest.mark.parametrize("run_id", ["", "a/b", "{a}", "a:b", "..", ".hidden", "a b", "x" * 64, "é"])
def test_run_ids_are_slugs(run_id):
    with raises(MalformedRunId, run_id=run_id):
        check_run_id(run_id)
    with raises(MalformedRunId, run_id=run_id):
        RunKeys.of(run_id)


def test_keys_of_a_run_share_one_hash_tag():
    assert RunKeys.of("grpo-7b").events == "trinity:{grpo-7b}:events"
    assert all("{grpo-7b}" in key for key in RunKeys.of("grpo-7b"))


def test_weights_have_hash_tags_of_their_own():
    assert "{r.1.2.0}" in manifest_key("r", 1, 2, 0)
    assert chunk_key("r", 1, 2, 0, 7).endswith(":7")


def manifest(**changes):
    fields = {
        "run_id": "r",
        "epoch": 1,
        "step": 2,
        "rank": 0,
        "tensors": (
            TensorEntry(name="a", dtype="float32", shape=(2, 3), offset=0),
            TensorEntry(name="b", dtype="bfloat16", shape=(), offset=24),
            TensorEntry(name="c", dtype="int8", shape=(0, 4), offset=26),
        ),
        "chunks": (Chunk(nbytes=20, digest=DIGEST), Chunk(nbytes=6, digest=DIGEST)),
    }
    return WeightManifest(**{**fields, **changes})


def test_a_manifest_survives_the_wire():
    assert decode_manifest(encode(manifest())) == manifest()
    assert manifest().nbytes == 26


def test_manifests_with_the_same_tensors_share_them_and_are_checked_each():
    first, second = encode(manifest()), encode(manifest(step=3))
    assert decode_manifest(first).tensors is decode_manifest(second).tensors
    raw = msgspec.msgpack.decode(first)
    with raises_from(ManifestContradiction, fault="sizes", actual=26, expected=20):
        decode_manifest(msgspec.msgpack.encode({**raw, "chunks": raw["chunks"][:1]}))
    assert decode_manifest(encode(shrunk())) == shrunk()
    raw = msgspec.msgpack.decode(encode(shrunk()))
    del raw["base"]
    with raises_from(ManifestContradiction, fault="base", tensor="a"):
        decode_manifest(msgspec.msgpack.encode(raw))


def test_entries_that_were_encoded_before_make_the_same_manifest():
    made = manifest()
    fields = {**msgspec.structs.asdict(made), "tensors": encode_entries(made.tensors)}
    assert encode(EncodedManifest(**fields)) == encode(made)
    with raises(MessageUnencodable, message="a list of tensors", fault="text"):
        encode_entries([msgspec.structs.replace(made.tensors[0], name="\udcff")])


def test_a_tensor_lies_behind_the_one_before_or_at_the_next_aligned_place():
    first, other = (TensorEntry(name=name, dtype="int8", shape=(1,), offset=0) for name in "ab")
    for offset, fits in ((0, False), (1, True), (2, False), (63, False), (64, True), (128, False)):
        chunks = (Chunk(nbytes=offset + 1, digest=DIGEST),)
        moved = msgspec.structs.replace(other, offset=offset)
        refused = raises(ManifestContradiction, fault="offset", tensor="b", actual=offset)
        with nullcontext() if fits else refused:
            manifest(tensors=(first, moved), chunks=chunks)


@pytest.mark.parametrize(
    ("field", "value", "fault", "actual"),
    [
        ("tensors", [{"name": "a", "dtype": "float32", "shape": [7], "offset": 0}], "sizes", 28),
        (
            "tensors",
            [{"name": "a", "dtype": "float128", "shape": [1], "offset": 0}],
            "dtype",
            "float128",
        ),
        ("tensors", [{"name": "a", "dtype": "int8", "shape": [26], "offset": 5}], "offset", 5),
        ("chunks", [[2**60, DIGEST]], "sizes", 26),
    ],
)
def test_a_manifest_that_lies_is_refused(field, value, fault, actual):
    raw = {**to_json(manifest()), field: value}
    with raises_from(ManifestContradiction, fault=fault, actual=actual):
        decode_manifest(msgspec.msgpack.encode(raw))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tensors", [{"name": "a", "dtype": "int8", "shape": [2**60], "offset": 0}]),
        ("tensors", [{"name": "a", "dtype": "int8", "shape": [-1], "offset": 0}]),
        ("chunks", [[26, "md5"]]),
    ],
)
def test_a_manifest_with_a_value_out_of_bounds_is_refused(field, value):
    raw = {**to_json(manifest()), field: value}
    with raises(MessageUndecodable, expected="a weight manifest", reason=re.compile("^Expected")):
        decode_manifest(msgspec.msgpack.encode(raw))


def test_a_manifest_without_deltas_is_the_bytes_that_it_always_was():
    tensors = [
        {"name": entry.name, "dtype": entry.dtype, "shape": entry.shape, "offset": entry.offset}
        for entry in manifest().tensors
    ]
    raw = {"run_id": "r", "epoch": 1, "step": 2, "rank": 0, "tensors": tensors}
    chunks = [[20, DIGEST], [6, DIGEST]]
    assert encode(manifest()) == msgspec.msgpack.encode({**raw, "chunks": chunks})


BASE = PartBase(epoch=1, step=1, manifest_digest=DIGEST, bytes=10)


def shrunk(**changes):
    """A manifest of a delta, of a tensor that was skipped and of a dense one."""
    fields = {"encoding": "delta", "stored": 5, "digest": DIGEST, **changes}
    delta = TensorEntry(name="a", dtype="float32", shape=(2, 3), offset=0, **fields)
    stored = delta.part_bytes
    skipped = TensorEntry(
        name="b", dtype="int8", shape=(9,), offset=stored, encoding="skip", digest=DIGEST
    )
    dense = TensorEntry(name="c", dtype="int8", shape=(2,), offset=stored)
    chunks = (Chunk(nbytes=stored + 2, digest=DIGEST),)
    return manifest(tensors=(delta, skipped, dense), chunks=chunks, base=BASE)


def test_a_manifest_of_deltas_survives_the_wire_and_tiles_what_they_take():
    assert decode_manifest(encode(shrunk())) == shrunk()
    assert shrunk().nbytes == 7
    assert [entry.nbytes for entry in shrunk().tensors] == [24, 9, 2]


@pytest.mark.parametrize(
    ("changes", "attributes"),
    [
        ({"stored": 24}, {"fault": "delta", "actual": 24, "expected": 24}),
        ({"stored": 0}, {"fault": "delta", "actual": 0}),
        ({"digest": None}, {"fault": "digest"}),
        ({"encoding": "skip"}, {"fault": "skip"}),
        ({"encoding": "dense", "digest": None}, {"fault": "stored"}),
    ],
)
def test_a_manifest_whose_deltas_contradict_it_is_refused(changes, attributes):
    with raises(ManifestContradiction, tensor="a", **attributes):
        shrunk(**changes)


def test_a_delta_needs_a_part_that_it_rests_on():
    with raises(ManifestContradiction, fault="base", tensor="a"):
        msgspec.structs.replace(shrunk(), base=None)


def test_a_tensor_appears_once_in_a_manifest():
    twice = (TensorEntry(name="a", dtype="int8", shape=(0,), offset=0),) * 2
    with raises(ManifestContradiction, fault="twice", tensor="a"):
        manifest(tensors=twice, chunks=())


def test_a_request_and_its_answer_survive_the_wire():
    assert decode_request(encode(REQUEST)) == REQUEST
    environment = Turn(role="environment", tokens=[7, 8, 9])
    later = Turn(role="policy", tokens=[4], logprobs=[-1.0], versions=[(StepRef(1, 3), 1)])
    sample = experience(PROMPT, policy(), environment, later)
    assert decode_experience(encode(sample)) == sample
    assert sample.oldest_version == StepRef(1, 3)


def test_lists_of_older_explorers_are_read_as_arrays():
    sample = experience(PROMPT, policy([2, 70_000, 3]))
    read = decode_experience(msgspec.msgpack.encode(as_lists(sample)))
    assert read == sample
    assert encode(read) == encode(sample)
    assert read.turns[1].tokens == [2, 70_000, 3]


@pytest.mark.parametrize(
    ("largest", "token_bytes"), [(65_535, 2), (65_536, 4)], ids=["uint16", "int32"]
)
def test_a_token_takes_its_array_alone(largest, token_bytes):
    count = 10_000
    short, long = (policy([largest] * n) for n in (1, 1 + count))
    added = len(encode(experience(PROMPT, long))) - len(encode(experience(PROMPT, short)))
    assert count * (token_bytes + 4) <= added <= count * (token_bytes + 4) + 16
    view = long.token_view
    assert view.obj is long.tokens.data, "its bytes were copied"
    assert (view.itemsize, view[-1]) == (token_bytes, largest)
    assert long.logprob_view.format == "f"


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"length": 3}, {"dtype": "uint16", "length": 3, "size": 4}),
        ({"data": b"abc"}, {"dtype": "uint16", "length": 2, "size": 3}),
    ],
)
def test_an_array_whose_bytes_are_not_its_length_is_refused(changes, fault):
    raw = msgspec.to_builtins(experience(), builtin_types=(bytes,))
    raw["turns"][1]["tokens"] |= changes
    with raises_from(ArrayDamaged, **fault):
        decode_experience(msgspec.msgpack.encode(raw))


def test_an_array_of_an_unknown_type_is_refused():
    raw = msgspec.to_builtins(experience(), builtin_types=(bytes,))
    raw["turns"][1]["logprobs"]["dtype"] = "float64"
    with raises(ExperienceUnreadable, reason=re.compile("float64.*logprobs.dtype")):
        decode_experience(msgspec.msgpack.encode(raw))


def test_values_that_are_no_tokens_become_no_array():
    for values in ([0.5], ["a"], [2**31]):
        with raises(ArrayValuesRefused, dtypes=("uint16", "int32")):
            TokenArray.pack(values)


def test_samples_of_a_group_share_their_prompt():
    group = [experience(PROMPT, policy([2, 3 + at]), sample=at) for at in (0, 1)]
    sent = share_prompts(group)
    assert sent[0] == group[0]
    assert sent[1].shares_prompt
    assert len(sent[1].turns[0].tokens) == 0
    received = [decode_experience(encode(sample)) for sample in sent]
    assert [sample.with_prompt_of(received[0]) for sample in received] == group
    alone = [experience(Turn(role="prompt", tokens=[9]), policy(), sample=1)]
    assert share_prompts([group[0], *alone]) == [group[0], *alone]


@pytest.mark.parametrize(
    ("turns", "fault"),
    [
        ([policy(), PROMPT], "prompt"),
        ([Turn(role="prompt", tokens=[]), policy()], "prompt"),
        ([PROMPT, PROMPT], "policy"),
        ([PROMPT, policy(logprobs=[-0.5])], "logprobs"),
        ([PROMPT, policy(), Turn(role="environment", tokens=[1], logprobs=[-0.5])], "logprobs"),
        ([PROMPT, policy(counted=1)], "versions"),
    ],
)
def test_an_experience_that_contradicts_itself_is_refused(turns, fault):
    raw = {**as_lists(experience()), "turns": [as_lists(turn) for turn in turns]}
    with raises_from(ExperienceContradiction, fault=fault):
        decode_experience(msgspec.msgpack.encode(raw))


def test_an_experience_of_a_prompt_alone_is_refused():
    raw = {**as_lists(experience()), "turns": [as_lists(PROMPT)]}
    with raises(ExperienceUnreadable, reason=re.compile("length >= 2")):
        decode_experience(msgspec.msgpack.encode(raw))


def test_a_sample_beyond_its_group_is_refused():
    with raises(ExperienceContradiction, fault="sample", sample=2, samples=2):
        experience(sample=2)


@pytest.mark.parametrize("ranges", [[[3, 2]], [[0, 4], [4, 5]], [[5, 6], [0, 1]]])
def test_ranges_of_ordinals_that_overlap_or_do_not_ascend_are_refused(ranges):
    for event, fields in (
        (RolloutsDispatched(ordinals=((0, 1),)), {"ordinals": ranges}),
        (RolloutsDispatched(), {"dropped": {"filtered": ranges}}),
        (StepTrained(step=1, trained=((0, 1),)), {"trained": ranges}),
        (StepTrained(step=1), {"dropped": {"filtered": ranges}}),
    ):
        raw = to_json(envelope(event))
        raw["event"] |= fields
        with raises_from(RangesOverlap):
            decode_envelope(msgspec.msgpack.encode(raw))


LEDGER = TrainedLedger(step=7, mark=5, next=16, settled=((7, 8),), trained=7, fingerprint=DIGEST)


@pytest.mark.parametrize(
    ("changes", "error", "attributes"),
    [
        ({"settled": ((5, 6),)}, LedgerContradiction, {"fault": "mark", "ordinal": 5}),
        ({"settled": ((4, 6),)}, RangesOverlap, {"first": 4, "last": 6, "before": 4}),
        ({"settled": ((7, 16),)}, LedgerContradiction, {"fault": "next", "ordinal": 16}),
        ({"mark": 17, "settled": ()}, LedgerContradiction, {"fault": "next", "ordinal": 16}),
    ],
)
def test_a_ledger_that_contradicts_itself_is_refused(changes, error, attributes):
    with raises(error, **attributes):
        msgspec.structs.replace(LEDGER, **changes)


def test_a_ledgers_digest_is_of_what_it_holds_and_survives_the_wire():
    sent = envelope(LedgerRestored(ledger=LEDGER, digest=LEDGER.digest))
    assert decode_envelope(encode(sent)).event.ledger.digest == LEDGER.digest
    reasons = {"a": 1, "b": 2}
    first, other = (
        msgspec.structs.replace(LEDGER, dropped=dict(order))
        for order in (reasons.items(), reversed(reasons.items()))
    )
    assert first.digest == other.digest != LEDGER.digest


def test_a_resume_names_the_checkpoint_of_its_own_step():
    with raises(ResumeContradiction, step=7, checkpoint=6):
        RunResumed(step=7, checkpoint=StepRef(1, 6))
