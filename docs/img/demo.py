#!/usr/bin/env python3
"""Draws demo.svg: what `cargo xtask demo` prints on this machine. Needs root and the build that the demo needs.

    docs/img/demo.py             runs the demo
    docs/img/demo.py --from LOG  draws the saved output of a run instead
"""

import argparse
import os
import pty
import re
import subprocess
import sys
from html import escape
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
COMMAND = ["cargo", "xtask", "demo"]
# Width of a character and height of a line, in pixels, at this font size.
SIZE, WIDTH, HEIGHT = 13, 7.83, 17
TEXT, FAINT, PROMPT, BAR = "#e6edf3", "#7d8590", "#7ee787", "#58a6ff"
COLOURS = {"32": "#3fb950", "31": "#f85149"}


def run_in_terminal():
    """The output of the demo with colours, as it writes only to a terminal. Its progress stays on our stderr."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(COMMAND, cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=theirs) as demo:
        os.close(theirs)
        output = b""
        try:
            while chunk := os.read(ours, 65536):
                output += chunk
        except OSError:  # Linux reports the end of a pseudo-terminal as EIO.
            pass
    if demo.returncode:
        sys.exit(f"`{' '.join(COMMAND)}` failed with status {demo.returncode}: its messages are above")
    return output.decode()


def cell(words, x, y, colour):
    """Text whose every character keeps its column, whatever font the viewer has."""
    length = len(words) * WIDTH
    return (f'<text x="{x:.1f}" y="{y}" fill="{colour}" textLength="{length:.1f}" lengthAdjust="spacingAndGlyphs"'
            f' xml:space="preserve">{escape(words)}</text>')


def line(words, y):
    """A line of the terminal: rules and bars as shapes, colours as the terminal shows them."""
    if words and set(words) <= {"─", "═"}:
        return [f'<rect x="20" y="{y - 5}" width="{len(words) * WIDTH:.1f}" height="1" fill="{FAINT}"/>']
    parts, column, colour = [], 0, TEXT
    for piece in re.split(r"(\x1b\[\d*m|█+)", words):
        if escaped := re.fullmatch(r"\x1b\[(\d*)m", piece):
            colour = COLOURS.get(escaped[1], TEXT)
            continue
        x = 20 + column * WIDTH
        if piece.startswith("█"):
            parts.append(f'<rect x="{x:.1f}" y="{y - 10}" width="{len(piece) * WIDTH:.1f}" height="10" fill="{BAR}"/>')
        else:
            # Several spaces separate columns. Each column gets a text element of its own, which keeps it in place.
            parts += [cell(word[0], x + word.start() * WIDTH, y, colour) for word in re.finditer(r"\S+( \S+)*", piece)]
        column += len(piece)
    return parts


def draw(output):
    lines = [words.rstrip() for words in output.replace("\r", "").strip("\n").split("\n")]
    columns = max(len(re.sub(r"\x1b\[\d*m", "", words)) for words in lines)
    width, height = round(columns * WIDTH) + 40, (len(lines) + 2) * HEIGHT + 50
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
             f' font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" font-size="{SIZE}">',
             "<title>Output of cargo xtask demo</title>",
             f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>']
    parts += [f'<circle cx="{x}" cy="18" r="6" fill="{colour}"/>'
              for x, colour in ((22, "#ff5f56"), (42, "#ffbd2e"), (62, "#27c93f"))]
    parts += [cell("#", 20, 52, PROMPT), cell(" ".join(COMMAND), 20 + 2 * WIDTH, 52, TEXT)]
    for number, words in enumerate(lines, 2):
        parts += line(words, 52 + number * HEIGHT)
    return "\n".join([*parts, "</svg>"]) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--from", dest="log", type=Path, metavar="LOG", help="saved output of a run")
    log = parser.parse_args().log
    output = log.read_text() if log else run_in_terminal()
    Path(__file__).with_name("demo.svg").write_text(draw(output))


if __name__ == "__main__":
    main()
