"""Help, and what can be refused at once, does not wait for torch; how long it takes is asserted in bench/."""

import subprocess
import sys
from pathlib import Path

COMMANDS = (
    ("--help",), ("--version",), ("run", "--help"), ("fly",), ("run", "nowhere.py"), ("graph", "nowhere.py"),
    ("plan", "nowhere.py"), ("try", "nowhere.py", "--arg", "lr=1,2"), ("run", "here.py", "--plan", "fly"),
    ("verify", "here.py", "--plan", "dpp"), ("predict", "here.py", "--plan", "fly"),
    ("run", "here.py", "--mesh", "data"), ("plan", "here.py", "--plan", "fly"),
    ("run", "--resume", "nowhere"), ("report", "nowhere"), ("run", "here.py", "--ranks", "two"),
    ("run", "here.py", "--out", "."),
)  # fmt: skip
SCRIPT = """
import sys
from plait.cli.main import call
for command in {commands!r}:
    code = call(list(command))
    assert code == (0 if command[-1] in ("--help", "--version") else 2), (command, code)
    assert "torch" not in sys.modules, command
"""


def test_torch_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "here.py").write_text("raise AssertionError('imported')")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(commands=COMMANDS)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("there is no file nowhere.py") == 4 and "did you mean 'ddp'?" in done.stderr
