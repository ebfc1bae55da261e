"""Program that runs an answer's code with limits; the standard library alone, for it starts often.

It reads a line of limits, a line with a token, and the code. It writes the token once the code has
run to its end: code that leaves early, by whatever exit, does not.
"""

import json
import os
import resource
import sys


def main() -> None:
    """Run the program that standard input holds."""
    stdin = sys.stdin.buffer
    limits, token = json.loads(stdin.readline()), stdin.readline().strip()
    source = stdin.read()
    told = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    seconds = int(limits["seconds"]) + 1
    for kind, limit in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, limits["files"]),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))
    exec(compile(source, "answer.py", "exec"), {"__name__": "__main__"})  # noqa: S102
    os.write(told, token)


if __name__ == "__main__":
    main()
