"""A version starts at low priority only where it can take its own priority back."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, threading, time
from pathlib import Path
from trieton.serving import background
def priorities():
    return sorted({os.getpriority(os.PRIO_PROCESS, int(task.name)) for task in Path("/proc/self/task").iterdir()})
before = priorities()
entered = background.enter()
threading.Thread(target=time.sleep, args=(1,), daemon=True).start()  # it inherits what its starter has
during = priorities()
background.leave()
print(before, entered, during, priorities())
"""


def run(*prefix: str) -> str:
    return subprocess.run([*prefix, sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may raise a priority here")
def test_every_thread_is_niced_and_gets_its_priority_back():
    assert run() == "[0] True [10] [0]\n"


@pytest.mark.skipif(not Path("/usr/bin/setpriv").exists(), reason="setpriv of util-linux takes the right away")
def test_nothing_changes_where_the_priority_could_not_be_taken_back():
    prefix = ["setpriv", "--bounding-set=-sys_nice", "--inh-caps=-sys_nice"] if os.geteuid() == 0 else []
    assert run(*prefix) == "[0] False [0] [0]\n"
