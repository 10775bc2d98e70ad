#!/usr/bin/env python3
"""Runs the commands of first-hour.md as a user would type them, and writes what they print, and how long they take.

    docs/first-hour.py            runs all blocks; fails if a command fails, hangs, or lacks the output that the page names
    docs/first-hour.py --write    also writes times and output into the page

One shell runs all blocks ```sh. If a block ```text follows, the script replaces its lines by as many lines of the output,
from the one that begins with the same two words on; `…` stands for the rest. Needs root, and what `cargo xtask setup`
installs.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PAGE = REPOSITORY / "docs/first-hour.md"
BLOCK = re.compile(r"```sh\n(?P<commands>.*?)```\n(?P<time>\n\*[^\n]*\*\n)?(?P<output>\n```text\n(?P<text>.*?)```\n)?", re.S)
END = "--- end of block ---"
# Seconds for one block: a loop that waits for something may wait for ever.
LIMIT = 600


class Shell:
    """A shell in which the blocks run, one after the other."""

    def __init__(self):
        self.process = subprocess.Popen(
            ["bash"],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.timed_out = False
        self.errors = tempfile.NamedTemporaryFile(prefix="first-hour-", suffix=".log", delete=False).name

    def time_out(self):
        self.timed_out = True
        os.killpg(self.process.pid, signal.SIGKILL)

    def end(self):
        """Ends the shell and what it runs, and removes what the demos have left."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        subprocess.run(["cargo", "xtask", "demo", "--remove"], cwd=REPOSITORY, check=False, capture_output=True)
        Path(self.errors).unlink()

    def run(self, commands):
        """Runs the commands of a block; returns their output. Exits if one of them fails or takes longer than LIMIT."""
        # What commands hide from the reader of the page is what explains a failure.
        commands = commands.replace("2>/dev/null", f"2>>{self.errors}").replace(">/dev/null 2>&1", f">>{self.errors} 2>&1")
        timer = threading.Timer(LIMIT, self.time_out)
        timer.daemon = True
        timer.start()
        self.process.stdin.write(f"{{ set -e; {commands}\nset +e; }} </dev/null; echo '{END}'\n")
        self.process.stdin.flush()
        lines = []
        for line in self.process.stdout:
            if line.rstrip() == END:
                timer.cancel()
                return lines
            lines.append(line.rstrip())
        timer.cancel()
        why = f"took longer than {LIMIT} s" if self.timed_out else "failed"
        hidden = Path(self.errors).read_text()[-4000:]
        sys.exit(f"a command {why}:\n{commands}\nIt printed:\n" + "\n".join(lines) + f"\nHidden output:\n{hidden}")


def spoken(seconds):
    """A time in words."""
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} min"


def matching(text, lines):
    """The lines of the output that the page shows: those from the one that its first words name on."""
    shown = [line for line in text.splitlines() if line != "…"]
    if not shown:
        return lines
    first = shown[0].split()[:2]
    start = next((at for at, line in enumerate(lines) if line.split()[:2] == first), None)
    if start is None:
        sys.exit(f"no line begins with {' '.join(first)!r} in the output:\n" + "\n".join(lines))
    found = lines[start : start + len(shown)]
    return (["…"] if start else []) + found + (["…"] if start + len(shown) < len(lines) else [])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write times and output into the page")
    write = parser.parse_args().write
    if os.geteuid() != 0:
        sys.exit("the commands make network namespaces and load BPF programs: run this as root")
    # So that the end of the script cleans up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    shell, total = Shell(), 0.0

    def play(block):
        nonlocal total
        commands = block["commands"]
        print("$ " + commands.rstrip().replace("\n", "\n$ "), flush=True)
        start = time.monotonic()
        lines = shell.run(commands)
        seconds = time.monotonic() - start
        total += seconds
        print("\n".join(lines) + f"\n({spoken(seconds)})", flush=True)
        page = f"```sh\n{commands}```\n\n*{spoken(seconds)}*\n"
        if block["output"]:
            page += "\n```text\n" + "\n".join(matching(block["text"], lines)) + "\n```\n"
        return page

    try:
        page = BLOCK.sub(play, PAGE.read_text())
    finally:
        shell.end()
    print(f"all blocks: {spoken(total)}")
    if write:
        machine = f"{os.cpu_count()} CPUs, Linux {os.uname().release.split('-')[0]}"
        today = time.strftime("%Y-%m-%d")
        page = re.sub(r"(?m)^Last run: .*$", f"Last run: {today}, {machine}, {spoken(total)} in all.", page)
        PAGE.write_text(page)


if __name__ == "__main__":
    main()
