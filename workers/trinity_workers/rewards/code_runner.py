"""Program that runs an answer's code with limits; the standard library alone, for it starts often.

It reads a line of limits, a line with a token, and the code and its tests as JSON. It writes the
token once both have run to their end: code that leaves early, by whatever exit, does not.
"""

import builtins
import json
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from symtable import SymbolTable, symtable


def main() -> None:
    """Run the program that standard input holds."""
    stdin = sys.stdin.buffer
    limits, token = json.loads(stdin.readline()), stdin.readline().strip()
    program = json.loads(stdin.read())
    # A descriptor of its own for the token: what the code prints goes nowhere.
    result = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    # Whole seconds alone, and rounded up: of code on one thread the parent ends before it.
    seconds = int(limits["seconds"]) + 1
    for kind, limit in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, limits["files"]),
        (resource.RLIMIT_CORE, 0),
    ):
        # The hard limit too: the code could raise the soft one again.
        resource.setrlimit(kind, (limit, limit))
    # As a script has it, so that code behind a main guard runs.
    names = {"__name__": "__main__"}
    for block in choose_blocks(program["blocks"], program["tests"]):
        exec(compile(block, "answer.py", "exec"), names)  # noqa: S102
    # Compiled apart from the code, so that no quote or bracket of it reaches into the tests.
    exec(compile(program["tests"], "tests.py", "exec"), names)  # noqa: S102
    os.write(result, token)


def choose_blocks(blocks: list[str], tests: str) -> list[str]:
    """Return the blocks to run, in order: the last one, and earlier ones that define its names.

    A block after the program often shows its use, and one before it may hold its imports. Earlier
    drafts, and pieces that explain the program, define nothing that it lacks, and are left out.
    """
    if len(blocks) == 1:
        return blocks
    last = len(blocks) - 1
    names = {}
    for number, block in enumerate(blocks):
        with suppress(SyntaxError):  # pieces of a program; the last block fails when it is run
            names[number] = _names(block)
    chosen = {last}
    with suppress(SyntaxError):
        defined, missing = names.get(last, (set(), set()))
        missing = (missing | _names(tests)[1]) - defined
        while definers := {
            number for number in names.keys() - chosen if names[number][0] & missing
        }:
            newest = max(definers)  # the earlier ones are drafts of it
            chosen.add(newest)
            defined = defined | names[newest][0]
            missing = (missing | names[newest][1]) - defined
    return [blocks[number] for number in sorted(chosen)]


def _names(source: str) -> tuple[set[str], set[str]]:
    """Return the names that a module defines, and those that it uses without defining them."""
    table = symtable(source, "answer.py", "exec")
    defined = {
        name.get_name() for name in table.get_symbols() if name.is_assigned() or name.is_imported()
    }
    return defined, {*_used(table)} - defined - {*dir(builtins)}


def _used(table: SymbolTable) -> Iterator[str]:
    """Yield the names that are looked up in the module."""
    for name in table.get_symbols():
        if name.is_referenced() and (name.is_global() or table.get_type() == "module"):
            yield name.get_name()
    for inner in table.get_children():
        yield from _used(inner)


if __name__ == "__main__":
    main()
