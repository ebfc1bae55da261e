"""Clocks of hosts that are apart: a library that is loaded before libc shifts the time of day."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

# The clock of a machine is one for all its namespaces; only the monotonic ones can be shifted.
_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
static long ahead(void) { const char *text = getenv("CLOCK_AHEAD"); return text ? atol(text) : 0; }
int clock_gettime(clockid_t id, struct timespec *now) {
    static int (*next)(clockid_t, struct timespec *);
    if (!next) next = dlsym(RTLD_NEXT, "clock_gettime");
    int result = next(id, now);
    if (!result && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += ahead();
    return result;
}
int gettimeofday(struct timeval *now, void *zone) {
    struct timespec spec;
    int result = clock_gettime(CLOCK_REALTIME, &spec);
    now->tv_sec = spec.tv_sec;
    now->tv_usec = spec.tv_nsec / 1000;
    return result;
}
time_t time(time_t *into) {
    struct timespec spec;
    clock_gettime(CLOCK_REALTIME, &spec);
    if (into) *into = spec.tv_sec;
    return spec.tv_sec;
}
"""


def has_clocks() -> bool:
    """Return True if clocks can be shifted here: the library is compiled."""
    return shutil.which("cc") is not None


def build_clock(folder: Path, ahead: float) -> dict[str, str]:
    """Return the variables of a process whose clock is ahead by some whole seconds."""
    library = folder / "shared" / "clock.so"
    if not library.exists():
        source = folder / "clock.c"
        source.write_text(_SOURCE)
        command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
        subprocess.run(command, check=True)
    return {"LD_PRELOAD": "/mnt/shared/clock.so", "CLOCK_AHEAD": str(round(ahead))}
