"""A version starts at low priority only where it can take its own priority back."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, os, threading, time
from pathlib import Path
from trieton.serving import background
def priorities():
    return sorted({os.getpriority(os.PRIO_PROCESS, int(task.name)) for task in Path("/proc/self/task").iterdir()})
before = priorities()
entered = background.enter()
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()  # it inherits what its starter has
during = priorities()
background.leave()
print(json.dumps([before, entered, during, priorities()]))
"""


OWN = os.getpriority(os.PRIO_PROCESS, 0)  # the tests themselves may have been niced


def run(*prefix: str) -> list:
    done = subprocess.run([*prefix, sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.case("W37")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may raise a priority here")
def test_every_thread_is_niced_and_gets_its_priority_back():
    assert run() == [[OWN], True, [min(OWN + 10, 19)], [OWN]]
    assert run("nice", "-n", "3") == [[min(OWN + 3, 19)], True, [min(OWN + 13, 19)], [min(OWN + 3, 19)]]


@pytest.mark.skipif(not Path("/usr/bin/setpriv").exists(), reason="setpriv of util-linux takes the right away")
def test_nothing_changes_where_the_priority_could_not_be_taken_back():
    prefix = ["setpriv", "--bounding-set=-sys_nice", "--inh-caps=-sys_nice"] if os.geteuid() == 0 else []
    assert run(*prefix) == [[OWN], False, [OWN], [OWN]]
