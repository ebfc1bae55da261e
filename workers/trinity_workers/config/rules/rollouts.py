"""Rules of explorers and rollouts: their place, prompts in flight, turns and versions."""

from __future__ import annotations

from trinity_events.rollouts import find_answer_bytes

from ...rollout_engines.base import RolloutEngineError
from ...rollout_engines.proof import STATUSES, ProofOptions
from ...rollout_engines.vllm.server_options import NAME as VLLM_SERVER
from ...rollout_engines.vllm.server_options import get_url, read_server_options
from ...rules import (
    Computed,
    Contradictions,
    OnlyWhen,
    Requires,
    Rule,
    SettingCondition,
    Values,
    format_list,
    is_any,
    is_at_least,
    is_positive,
    is_set,
)
from ..sync_schedule import names_exact_version, publishes_on_demand

_COLOCATED = is_any("trainer.colocated", True)
_UPDATES = ~is_any("rollouts.pause_mode", "wait")
_CONTINUES = _UPDATES & ~is_any("rollouts.pause_mode", "abort")
_FIXED = is_any("sync.style", "fixed")
_VLLM = is_any("explorer.engine", "vllm", "vllm-server")
_SEVERAL_STEPS_OPEN = ~_FIXED | is_at_least("sync.interval", 2) | is_positive("sync.offset")
"""Prompts of more than one step may be open at a time."""


_TEMPLATE_NAMES = {
    *("conversation", "chat_template", "add_generation_prompt", "continue_final_message"),
    *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs"),
}
"""Parameters of `apply_chat_template` that are no variables of a template; others would change the
kind of its result (transformers, tokenization_utils_base.py)."""


def _needs(needed: SettingCondition) -> Requires:
    return Requires(
        _COLOCATED,
        needed,
        "{trainer.colocated} generates between two steps, with the weights of the last one",
    )


def _find_small_window(values: Values) -> Contradictions:
    window, in_flight = values["window"], values["prompts_in_flight"]
    if window < in_flight:
        yield (
            ("rollouts.window", "rollouts.prompts_per_step", "sync.interval", "sync.max_staleness"),
            f"{{rollouts.window}} is {window}, and {in_flight} prompts are in flight between two "
            f"versions: choose at least {in_flight}, or leave it out",
        )


def _find_small_bytes(values: Values) -> Contradictions:
    limit = values["rollouts.max_bytes"]
    # The largest answers that the settings allow: the bound must hold one step of them.
    answer = find_answer_bytes(
        values["rollouts.samples_per_prompt"],
        sampled_tokens=values["rollouts.max_new_tokens"] * values["rollouts.max_turns"],
        prompt_tokens=values["rollouts.max_prompt_tokens"] or 0,
    )
    least = values["rollouts.prompts_per_step"] * answer
    if limit is not None and limit < least:
        yield (
            ("rollouts.max_bytes", "rollouts.prompts_per_step", "rollouts.max_new_tokens"),
            f"{{rollouts.max_bytes}} is {limit:,}, and the answers of one step may have {least:,} "
            "bytes: choose at least that, or leave it out",
        )


def _find_useless_updates(values: Values) -> Contradictions:
    sync, bound = values["sync"], values["staleness_bound"]
    # On demand, a version may come after every step.
    least = 1 if publishes_on_demand(sync) else sync.interval
    if _CONTINUES.is_met(values) and not names_exact_version(sync) and bound < least:
        yield (
            ("rollouts.pause_mode", "sync.max_staleness", "sync.interval"),
            f"{{=rollouts.pause_mode}} with {{sync.max_staleness}} {bound} trains on no answer "
            "that an earlier version began: set {rollouts.pause_mode} wait, or "
            f"{{sync.max_staleness}} {least} or more",
        )


def _find_unusable_gpus(values: Values) -> Contradictions:
    gpus, device = values["explorer.gpus"], values["explorer.device"]
    if gpus is not None and gpus > 1 and gpus % 1:
        yield (
            ("explorer.gpus",),
            f"{{explorer.gpus}} is {gpus:g}, and Ray divides one GPU alone: choose a whole number, "
            "or 1 or less",
        )
    if gpus is not None and gpus > 1 and values["explorer.engine"] == "huggingface":
        yield (
            ("explorer.gpus", "explorer.engine"),
            f"{{explorer.gpus}} is {gpus:g}, and {{=explorer.engine}} uses one: choose 1 or less",
        )
    if gpus and device == "cpu":
        yield (
            ("explorer.gpus", "explorer.device"),
            "{explorer.gpus} reserves GPUs that {=explorer.device} does not use: leave one of them "
            "out",
        )
    if gpus == 0 and device == "cuda":
        yield (
            ("explorer.device", "explorer.gpus"),
            "{=explorer.device} needs a GPU, and {explorer.gpus} 0 reserves none: leave one of "
            "them out",
        )


def _find_unusable_servers(values: Values) -> Contradictions:
    path = "explorer.engine_options"
    if values["explorer.engine"] != VLLM_SERVER or values["trainer.colocated"]:
        return
    try:
        options = read_server_options(values[path])
        # Each explorer drives a server of its own, by its rank.
        for rank in range(values["explorer.count"]):
            get_url(options, rank)
    except RolloutEngineError as error:
        yield (path, "explorer.engine", "explorer.count"), str(error)


def _find_unreachable_proof(values: Values) -> Contradictions:
    path, minimum = "explorer.min_proof", values["explorer.min_proof"]
    proof: ProofOptions = values["proof"]
    best = proof.best_status
    if minimum is None or values["trainer.colocated"]:
        return
    if STATUSES.index(minimum) > STATUSES.index(best):
        layers = "" if proof.layers is None else " with {=explorer.proof_layers}"
        yield (
            (path, "explorer.proof", "explorer.proof_layers", "sync.method"),
            f"{{{path}}} is {minimum}, and {{explorer.proof}} {proof.checks}{layers} proves no "
            f"version more than {best}: set {{{path}}} {best}, or other checks",
        )


def _find_reserved_template_names(values: Values) -> Contradictions:
    path = "rollouts.chat_template_kwargs"
    reserved = sorted(_TEMPLATE_NAMES & values[path].keys())
    if reserved:
        yield (
            (path,),
            f"{{{path}}} has {format_list(reserved)}, which the run gives itself: name variables "
            "of the template alone, such as enable_thinking",
        )


RULES: tuple[Rule, ...] = (
    _needs(is_any("sync.style", "trainer_driven")),
    _needs(is_any("sync.method", "memory")),
    _needs(~is_at_least("sync.interval", 2)),
    _needs(
        SettingCondition(
            ("sync.max_staleness",),
            lambda values: values["sync.max_staleness"] == 0,
            "{sync.max_staleness} is 0",
            "set {sync.max_staleness} 0",
        )
    ),
    _needs(is_any("rollouts.pause_mode", "wait")),
    Requires(
        _COLOCATED,
        ~is_positive("model.lora.rank"),
        "{trainer.colocated} generates with whole weights, and {model.lora.rank} trains adapters",
    ),
    OnlyWhen(
        "explorer.count explorer.dtype explorer.cpus explorer.gpus explorer.device "
        "explorer.min_proof explorer.proof_layers explorer.probe_tolerance explorer.wait_for_run",
        is_any("trainer.colocated", False),
        "with {trainer.colocated} the trainer's ranks answer",
    ),
    OnlyWhen(
        "explorer.engine explorer.engine_options explorer.proof",
        is_any("trainer.colocated", False) | is_any("explorer.engine", "vllm"),
        "with {trainer.colocated} the trainer's ranks answer, by themselves or by vLLM",
    ),
    OnlyWhen(
        "explorer.engine_options",
        ~is_any("explorer.engine", "huggingface"),
        "{=explorer.engine} has no options",
    ),
    Requires(
        _VLLM,
        ~is_any("explorer.deterministic", True),
        "{=explorer.engine} computes with whatever requests arrive together, and cannot generate "
        "each prompt by itself",
    ),
    Requires(
        _VLLM,
        ~is_any("sync.method", "nccl"),
        "with {=explorer.engine} its workers pull the weights, and are no members of the trainer's "
        "collective group",
    ),
    Requires(
        _VLLM,
        ~is_any("sync.transport", "ray"),
        "with {=explorer.engine} its workers pull the weights, and are no processes of Ray",
    ),
    Requires(
        _VLLM,
        ~is_any("sync.transport", "cuda-ipc"),
        "with {=explorer.engine} its workers pull the weights, and read them from the host's "
        "memory",
    ),
    Computed(_find_unusable_servers),
    Computed(_find_unreachable_proof),
    Computed(_find_unusable_gpus),
    Computed(_find_small_window),
    Computed(_find_small_bytes),
    OnlyWhen(
        "rollouts.max_turns",
        is_set("task.environment"),
        "without {task.environment} an episode has one turn",
    ),
    OnlyWhen(
        "rollouts.include_stop_str_in_output",
        is_set("rollouts.stop"),
        "no string ends a turn",
    ),
    Computed(_find_reserved_template_names),
    OnlyWhen(
        "rollouts.order",
        _SEVERAL_STEPS_OPEN,
        "the prompts of one step alone are open at a time",
    ),
    OnlyWhen(
        "rollouts.keep_answers",
        is_positive("checkpoints.interval"),
        "{checkpoints.interval} 0 writes no checkpoints, so that no answer would ever be deleted",
    ),
    Requires(
        _UPDATES,
        ~is_any("explorer.deterministic", True),
        "{=rollouts.pause_mode} lets answers depend on the moment at which weights arrive, which "
        "{explorer.deterministic} rules out",
        "set {rollouts.pause_mode} wait, or {explorer.deterministic} false",
    ),
    Requires(
        _UPDATES,
        ~_FIXED,
        "{=rollouts.pause_mode} changes versions amid an answer, and {sync.style} fixed has the "
        "steps between which explorers change them",
        "set {rollouts.pause_mode} wait, or another {sync.style}",
    ),
    Computed(_find_useless_updates),
)
