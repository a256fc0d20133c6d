"""`plait doctor`: what of plait works on this machine, and what to do about the rest.

In: nothing. Out: a table, or JSON; the exit code is 0 whatever was found, as finding it out did not fail.
"""

import json
from dataclasses import asdict

from rich import box
from rich.table import Table
from rich.text import Text

import plait
from plait.cli.console import plain_console
from plait.cli.options import JsonOption


def doctor(json_: JsonOption = False) -> None:
    """Tell what of plait works on this machine: environment, devices, links, optional parts; and what to install."""
    found = plait.doctor()
    if json_:
        findings = [asdict(finding) for finding in found.findings]
        print(json.dumps({"plait": found.plait, "ok": found.ok, "findings": findings}, indent=1))
        return
    table = Table(box=box.SIMPLE, show_header=False, title=f"plait {found.plait}", title_justify="left")
    table.add_column("name", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("what", overflow="fold")
    group = None
    for finding in found.findings:
        if finding.group != group:
            group = finding.group
            table.add_section()
            table.add_row(Text(group, style="bold"))
        state = Text("ok", style="green") if finding.ok else Text("absent", style="yellow")
        what = finding.what if finding.ok else f"{finding.what}\nFix: {finding.fix}"
        table.add_row(f"  {finding.name}", state, what)
    console = plain_console()
    console.print(table)
    absent = [finding.name for finding in found.findings if not finding.ok]
    if not found.ok:
        needed = [finding.name for finding in found.findings if finding.required and not finding.ok]
        console.print(f"plait cannot train here yet: {', '.join(needed)}.", soft_wrap=True)
    elif absent:
        console.print(
            f"plait can train here; absent, and not always needed: {', '.join(absent)}.", soft_wrap=True
        )
    else:
        console.print("plait can train here, with every part.")
