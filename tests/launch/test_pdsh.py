"""``deepspeed --hostfile`` over pdsh: what becomes of words on their way through a shell of each node, and the word that survives it.

    pytest tests/launch/test_pdsh.py -m full

pdsh is played by a script that does what it does with its words: it joins them with blanks, writes the number of the host for %n, and
gives the line to a shell there. The launcher and its ranks are DeepSpeed's own.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.launch.processes import BIN
from toolkit.cluster.parent import free_port

pytestmark = [pytest.mark.full, pytest.mark.timeout(200)]

PDSH = """#!/bin/bash
while [ "$1" != -w ]; do shift; done
hosts=$2; shift 2
line="$*"; number=0; ended=()
for host in ${hosts//,/ }; do
  env -i PATH="$PATH" HOME="$HOME" TORCHDYNAMO_DISABLE=1 bash -c "${line//%n/$number}" & ended+=($!)
  number=$((number + 1))
done
code=0
for process in "${ended[@]}"; do wait "$process" || code=$?; done
exit "$code"
"""
SCRIPT = """
import json, os, pathlib, sys
pathlib.Path(f"words-{os.environ['RANK']}.json").write_text(json.dumps(sys.argv[1:]))
"""
HOSTILE = ["run.name=two words", "data.path=$HOME/data", "eval.sets=['a','b']", "monitor.tags=[50%n]", "monitor.group=`hostname`",
           'monitor.prompt="quoted"']


def through(folder: Path, *words: str) -> list[list[str]]:
    """What the rank of each of two nodes gets of ``words``."""
    pdsh, script, hosts = folder / "pdsh", folder / "words.py", folder / "hostfile"
    pdsh.write_text(PDSH)
    pdsh.chmod(0o755)
    script.write_text(SCRIPT)
    hosts.write_text("node0 slots=1\nnode1 slots=1\n")
    environ = {**os.environ, "PATH": f"{folder}:{BIN}:{os.environ['PATH']}", "TORCHDYNAMO_DISABLE": "1"}
    command = [str(BIN / "deepspeed"), f"--hostfile={hosts}", "--no_ssh_check", "--master_addr=127.0.0.1", f"--master_port={free_port()}",
               str(script), *words]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads((folder / f"words-{rank}.json").read_text()) for rank in range(2)]
    assert all(words[0] == "--local_rank=0" for words in found)
    return [words[1:] for words in found]


def test_a_frozen_configuration_arrives(tmp_path: Path) -> None:
    """DeepSpeed#5878, #2802. All that a user wrote is in the file, and the line that the shells read has its path alone."""
    assert through(tmp_path, "--frozen=/shared/run/jobs/001/config.yaml") == [["--frozen=/shared/run/jobs/001/config.yaml"]] * 2


def test_control_words_do_not(tmp_path: Path) -> None:
    for arrived in through(tmp_path, *HOSTILE):
        lost = [word for word in HOSTILE if word not in arrived]
        assert lost == [word for word in HOSTILE if word != "run.name=two words"], "DeepSpeed quotes what has a blank, and nothing else"
