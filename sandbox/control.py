"""The few bytes that cross between broker, zygote and child. Fixed sizes: nothing here can grow with a program.

Broker to zygote (a stream socket): ORDER records; a FORK order carries three descriptors (control, stdout, stderr).
Zygote to broker: one JSON line at start, then DEATH records.
Broker to child (the control socket): a PROGRAM record, then the code.
Child to broker: READY, then one OUTCOME record. The program can forge an outcome and gains nothing: it misreports
itself, and is killed on it.
"""

from __future__ import annotations

import struct

ORDER = struct.Struct("<cI")  # order, the child's number
FORK, KILL = b"F", b"K"
DEATH = struct.Struct("<IidQ")  # the child's number, wait status, CPU seconds, peak resident bytes
PROGRAM = struct.Struct("<IQdBB")  # code bytes, seed, time limit in seconds, show last value, filter imports
OUTCOME = struct.Struct("<cBid64s")  # letter, value shown, exit code, CPU seconds, error type (UTF-8, zero padded)
READY = b"R"

OK, ERROR, OUT_OF_MEMORY, EXIT, REFUSED = b"o", b"e", b"m", b"x", b"r"
STATUS = {OK: "ok", ERROR: "error", OUT_OF_MEMORY: "out_of_memory", EXIT: "exit", REFUSED: "refused"}


def pack_outcome(letter: bytes, shown: bool, exit_code: int, cpu_s: float, error_type: str) -> bytes:
    name = error_type.encode("utf-8", "replace")[:64].decode("utf-8", "ignore").encode()
    return OUTCOME.pack(letter, shown, exit_code, cpu_s, name)


def unpack_outcome(data: bytes) -> tuple[str, bool, int, float, str] | None:
    """(status, value shown, exit code, CPU seconds, error type), or None for bytes that are no outcome."""
    if len(data) != OUTCOME.size:
        return None
    letter, shown, exit_code, cpu_s, name = OUTCOME.unpack(data)
    if letter not in STATUS or shown > 1 or not 0 <= cpu_s < 1e6:
        return None
    return STATUS[letter], bool(shown), exit_code, cpu_s, name.rstrip(b"\0").decode("utf-8", "replace")
