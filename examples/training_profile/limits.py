"""A part that fails or runs out of time must not cost the others."""

import signal
import time
import traceback
from contextlib import contextmanager


class OutOfTime(BaseException):
    """A part ran past its limit. Not an `Exception`: compilers wrap those, and there is nothing to fall back to."""


@contextmanager
def time_limit(seconds: float):
    """Raises [`OutOfTime`] inside after so many seconds, as soon as the main thread runs Python again; 0: never."""

    def ring(*_):
        raise OutOfTime(f"ran past {seconds:g} s")

    if not seconds:
        yield
        return
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def attempt(part, result: dict, save, limit: float, *arguments) -> None:
    """Fills `result` with a part's figures, and where it fails with its error: that must not cost the others."""
    started = time.perf_counter()
    try:
        with time_limit(limit):
            part(result, save, *arguments)
    except (Exception, OutOfTime) as error:
        traceback.print_exc()
        result["error"] = f"{type(error).__name__}: {str(error)[:500]}"
    result["seconds"] = time.perf_counter() - started
    save()
