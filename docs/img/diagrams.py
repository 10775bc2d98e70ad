#!/usr/bin/env python3
"""Draws overview.svg (README.md) and hooks.svg (ARCHITECTURE.md) beside itself. No dependencies.

    docs/img/diagrams.py && git diff --stat docs/img
"""

import math
from html import escape
from pathlib import Path

INK = "#1f2328"
FAINT = "#57606a"
# Colours of each kind of box: (fill, border).
COLOURS = {
    "outside": ("#ffffff", "#8c959f"),
    "kernel": ("#f6f8fa", "#8c959f"),
    "program": ("#dbeafe", "#1d4ed8"),
    "map": ("#fef3c7", "#b45309"),
    "agent": ("#dcfce7", "#15803d"),
    "stack": ("#e5e7eb", "#6b7280"),
}
REQUEST, REPLY, CONTROL = "#1d4ed8", "#be185d", "#15803d"


class Picture:
    """An SVG picture; coordinates are pixels, from the upper left corner."""

    def __init__(self, width, height, title):
        self.size = (width, height)
        self.parts = [f"<title>{escape(title)}</title>",
                      f'<rect width="{width}" height="{height}" fill="white"/>']

    def text(self, x, y, words, size=13, colour=INK, bold=False, anchor="middle", mono=False):
        weight = ' font-weight="bold"' if bold else ""
        family = ' font-family="DejaVu Sans Mono, Menlo, Consolas, monospace"' if mono else ""
        self.parts.append(f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}" text-anchor="{anchor}"'
                          f"{weight}{family}>{escape(words)}</text>")

    def box(self, x, y, width, height, kind, title="", *lines, dashed=False):
        """A box with a bold title and lines below it, centred; without lines the title is centred in it."""
        fill, border = COLOURS[kind]
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8" fill="{fill}"'
                          f' stroke="{border}" stroke-width="1.5"{dash}/>')
        top = y + height / 2 - 8 * len(lines) + 5
        if title:
            self.text(x + width / 2, top, title, 14, bold=True)
        for number, line in enumerate(lines, 1):
            self.text(x + width / 2, top + 17 * number, line, 12, FAINT)

    def arrow(self, *points, colour=REQUEST, dashed=False, both=False):
        """A line through the points with a head at its end (and, with `both`, at its beginning)."""
        dash = ' stroke-dasharray="6 4"' if dashed else ""
        line = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        self.head(points[-2], points[-1], colour)
        if both:
            self.head(points[1], points[0], colour)

    def line(self, *points, colour=REQUEST):
        """A line without a head."""
        line = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')

    def head(self, start, end, colour):
        angle = math.atan2(end[1] - start[1], end[0] - start[0])
        corners = [end] + [(end[0] - 11 * math.cos(angle + turn), end[1] - 11 * math.sin(angle + turn))
                           for turn in (0.4, -0.4)]
        self.parts.append(f'<polygon points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in corners)}" fill="{colour}"/>')

    def legend(self, x, y, *entries):
        for colour, words in entries:
            self.arrow((x, y - 4), (x + 30, y - 4), colour=colour)
            self.text(x + 38, y, words, 12, FAINT, anchor="start")
            x += 62 + 7 * len(words)

    def write(self, name):
        width, height = self.size
        head = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
                ' font-family="DejaVu Sans, Verdana, system-ui, sans-serif">')
        text = "\n".join([head, *self.parts, "</svg>"]) + "\n"
        (Path(__file__).parent / name).write_text(text)


def overview():
    """What takes part: clients, the three kinds of hooks, the maps, the agent and its sources, backends."""
    picture = Picture(960, 500, "Clients reach pods through BPF programs on a node; lb-agent writes the maps they read")

    picture.box(15, 48, 175, 62, "outside", "External client", "203.0.113.9")
    picture.box(15, 122, 175, 62, "outside", "Pod", "10.244.1.7")
    picture.box(15, 196, 175, 62, "outside", "Node process", "kubelet, sshd …")

    picture.box(230, 12, 500, 356, "kernel")
    picture.text(480, 34, "Linux kernel of a node", 13, FAINT, bold=True)
    picture.box(250, 48, 240, 62, "program", "XDP and tc programs", "on wires (eth0 …)")
    picture.box(250, 122, 240, 62, "program", "tc programs", "on the veth of each pod")
    picture.box(250, 196, 240, 62, "program", "socket hooks", "connect(), sendmsg() …")
    for y in (79, 153, 227):
        picture.arrow((190, y), (250, y))
        picture.line((490, y), (755, y))
    picture.text(610, 71, "VIP:port → backend:port", 12, FAINT)
    picture.text(610, 97, "replies: backend → VIP", 12, FAINT)

    for number, (name, words) in enumerate((("SERVICES", "VIP:port → slice"), ("BACKENDS", "slices of endpoints"),
                                            ("FLOWS", "flow → translation"))):
        picture.box(250 + 157 * number, 298, 147, 54, "map", name, words)
    picture.arrow((370, 258), (370, 298), colour=FAINT, dashed=True)
    picture.text(380, 283, "lookup in pinned maps", 12, FAINT, anchor="start")

    picture.line((755, 79), (755, 227))
    picture.box(800, 71, 145, 62, "outside", "Pod", "on this node")
    picture.box(800, 171, 145, 62, "outside", "Pod", "on another node")
    picture.arrow((755, 102), (800, 102))
    picture.arrow((755, 202), (800, 202))

    picture.box(15, 404, 175, 72, "outside", "Kubernetes API", "or a folder of", "YAML manifests")
    picture.box(330, 404, 300, 72, "agent", "lb-agent", "computes what the maps should hold",
                "and writes only the difference")
    picture.arrow((190, 440), (330, 440), colour=CONTROL)
    picture.text(260, 431, "watch", 12, FAINT)
    picture.arrow((480, 404), (480, 352), colour=CONTROL)
    picture.text(490, 389, "each change of a Service is one atomic switch", 12, FAINT, anchor="start")
    picture.legend(680, 445, (REQUEST, "traffic"), (CONTROL, "configuration"))
    picture.write("overview.svg")


def hooks():
    """Which hook does what to requests and replies, and the two ways that bypass the stack."""
    picture = Picture(960, 610, "XDP, tc and socket hooks of a node, and the way of packets through them")

    picture.box(130, 12, 690, 500, "kernel")
    picture.text(475, 34, "kernel of the node", 13, FAINT, bold=True)
    picture.box(10, 110, 95, 222, "outside", "client", "external:", "eth0 …", "or pod: veth")
    picture.box(845, 110, 105, 222, "outside", "backend", "pod: veth", "or wire", "to its node")
    picture.box(480, 110, 110, 222, "stack", "stack", "routing,", "netfilter,", "network", "policy")

    # Requests, left to right.
    picture.box(150, 110, 120, 92, "program", "XDP", "routed flows", "(wires only)")
    picture.box(305, 110, 140, 92, "program", "tc ingress", "new flow;", "VIP → backend")
    picture.box(625, 110, 175, 92, "program", "tc egress", "masqueraded flow:", "client → node")
    for start, end in ((105, 150), (270, 305), (445, 480), (590, 625), (800, 845)):
        picture.arrow((start, 156), (end, 156))
    picture.arrow((210, 110), (210, 62), (915, 62), (915, 110))
    picture.text(220, 56, "XDP: VIP → backend and client → node in one step, XDP_TX or XDP_REDIRECT", 12, FAINT,
                 anchor="start")
    picture.arrow((375, 110), (375, 88), (880, 88), (880, 110), dashed=True)
    picture.text(385, 82, "--forwarding direct: bypassing the stack, bpf_redirect_peer", 12, FAINT, anchor="start")

    # Replies, right to left.
    picture.box(625, 240, 175, 92, "program", "tc ingress", "masqueraded flow:", "node → client")
    picture.box(150, 240, 295, 92, "program", "tc egress", "reply entry: backend → VIP,",
                "after routing: filters see real addresses")
    for start, end in ((845, 800), (625, 590), (480, 445), (150, 105)):
        picture.arrow((start, 286), (end, 286), colour=REPLY)

    # Sockets.
    picture.box(10, 362, 95, 62, "outside", "process", "of the node")
    picture.box(150, 362, 295, 62, "program", "socket hooks (cgroup)", "connect, sendmsg: VIP → backend in the call")
    picture.box(480, 362, 110, 62, "stack", "socket", "never sends", "to a VIP")
    picture.arrow((105, 383), (150, 383))
    picture.arrow((445, 383), (480, 383))
    picture.arrow((480, 404), (445, 404), colour=REPLY)
    picture.arrow((150, 404), (105, 404), colour=REPLY)
    picture.arrow((535, 362), (535, 332), both=True)
    picture.text(620, 380, "All programs read the", 12, FAINT, anchor="start")
    picture.text(620, 397, "same pinned maps, which", 12, FAINT, anchor="start")
    picture.text(620, 414, "outlive the agent.", 12, FAINT, anchor="start")

    for number, (name, words) in enumerate((("SERVICES", "VIP:port → slices"), ("BACKENDS", "arena of slices"),
                                            ("FLOWS", "tuple → translation"), ("SETTINGS …", "node, policy"))):
        picture.box(150 + 165 * number, 448, 155, 48, "map", name, words)

    picture.box(10, 548, 190, 44, "outside", "API server or folder")
    picture.box(310, 548, 330, 44, "agent", "lb-agent", "desired state → plan → steps; expires flows")
    picture.arrow((475, 548), (475, 496), colour=CONTROL, both=True)
    picture.arrow((200, 570), (310, 570), colour=CONTROL)
    picture.legend(690, 574, (REQUEST, "request"), (REPLY, "reply"))
    picture.write("hooks.svg")


if __name__ == "__main__":
    overview()
    hooks()
