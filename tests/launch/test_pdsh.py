"""``deepspeed --hostfile`` over pdsh: arguments that pass through a shell on each node.

    pytest tests/launch/test_pdsh.py -m full -rs

pdsh, the launcher and its ranks are real (apt-get install pdsh; skipped without it). A script replaces ssh:
it drops the options and the host, joins the remaining arguments with spaces, and passes the line to a local
shell with a fresh environment.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.launch.processes import BIN
from toolkit.testing.dist import find_free_port

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(200),
    pytest.mark.skipif(
        shutil.which("pdsh") is None, reason="deepspeed over pdsh did not run: apt-get install pdsh"
    ),
]

SSH = """#!/bin/bash
while [[ "$1" == -* ]]; do shift; done
shift
exec env -i PATH="$PATH" HOME="$HOME" TORCHDYNAMO_DISABLE=1 bash -c "$*"
"""
SCRIPT = """
import json, os, pathlib, sys
pathlib.Path(f"words-{os.environ['RANK']}.json").write_text(json.dumps(sys.argv[1:]))
"""
FROZEN = "--frozen=/shared/run/jobs/001/config.yaml"
HOSTILE = [
    "run.name=two words",
    "data.path=$HOME/data",
    "eval.sets=['a','b']",
    "monitor.tags=[50%n]",
    "monitor.group=`hostname`",
    'monitor.prompt="quoted"',
]


def through(folder: Path, *words: str) -> list[list[str]]:
    """What the rank of each of two nodes gets of ``words``."""
    ssh, script, hosts = folder / "ssh", folder / "words.py", folder / "hostfile"
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    script.write_text(SCRIPT)
    hosts.write_text("node0 slots=1\nnode1 slots=1\n")
    environ = {**os.environ, "PATH": f"{folder}:{BIN}:{os.environ['PATH']}", "TORCHDYNAMO_DISABLE": "1"}
    command = [
        str(BIN / "deepspeed"),
        f"--hostfile={hosts}",
        "--no_ssh_check",
        "--master_addr=127.0.0.1",
        f"--master_port={find_free_port()}",
        str(script),
        *words,
    ]
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads((folder / f"words-{rank}.json").read_text()) for rank in range(2)]
    assert all(words[0] == "--local_rank=0" for words in found)
    return [words[1:] for words in found]


def test_frozen_configuration_survives_pdsh(tmp_path: Path) -> None:
    """DeepSpeed#5878, #2802. The file has all arguments, so the command line that the shells parse contains
    only its path. Control: the arguments themselves do not survive.
    """
    for arrived in through(tmp_path, FROZEN, *HOSTILE):
        lost = [word for word in (FROZEN, *HOSTILE) if word not in arrived]
        assert lost == [word for word in HOSTILE if word != "run.name=two words"], (
            "DeepSpeed quotes what has a blank, and nothing else"
        )
