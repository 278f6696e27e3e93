"""Interpreters that have imported torch and nothing else: forked from one, since that import is most of what a new one costs."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

FORKING = """
import json, os, sys, traceback
import torch, torch.nn.attention.varlen  # which brings torch._dynamo, as a first look at all backends does
for line in sys.stdin:
    folder, paths, script = json.loads(line)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.chdir(folder)
            os.dup2(os.open("stdout", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
            os.dup2(os.open("stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            sys.path[:0] = paths
            exec(compile(script, "script", "exec"), {"__name__": "__main__"})
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@functools.cache
def _parent() -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", FORKING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def run(folder: Path, script: str, *paths: Path) -> str:
    """What the script prints, run in the folder with these paths before all others. AssertionError with its stderr when it fails."""
    parent = _parent()
    print(json.dumps([str(folder), [str(path) for path in paths], script]), file=parent.stdin, flush=True)
    code = parent.stdout.readline().strip()
    assert code == "0", f"exit status {code or 'unknown: the parent ended'}: {(folder / 'stderr').read_text()}"
    return (folder / "stdout").read_text()
