"""Start a program that ends when its starter does: `python -I -S launcher.py PARENT_PID NICENESS PROGRAM ARGS...`.

Asks the kernel for SIGTERM at the parent's death, then becomes the program, so a killed publisher or test leaves no
server behind. A file of its own, without imports of the project: it costs 15 ms, and no Python code between fork and
exec of a parent that may have threads.
"""

import contextlib
import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # <sys/prctl.h>; kept across execve


def main() -> None:
    """Set the death signal, make sure the parent still lives, lower the priority, become the program."""
    parent, niceness, program = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before the line above
        sys.exit(143)
    os.nice(niceness)
    if niceness:
        # The server has a session of its own, and Linux may share the processor out by sessions first.
        with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as file:
            file.write(str(niceness))
    os.execv(program[0], program)


if __name__ == "__main__":
    main()
