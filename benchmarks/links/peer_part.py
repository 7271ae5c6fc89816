"""Part 'peer': precision 'paper' with and without overlap, compared with TorchRec and its fp16 codec."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from common.tables import table
from peers.installed import find_peers

import meseta
from hosts import Hosts
from links import peer_training, shapes, training
from links.rank_pool import RankPool, on_hosts, start_ranks
from links.timing import Measured, Options, asker, in_turns
from links.variants import Layout, Variant
from meseta.spec.stages import OVERLAPS

PAPER = Variant(precision="paper")
OVERLAPPED = Variant(precision="paper", overlap=OVERLAPS)
LEAST = {PAPER.name: 1.1, OVERLAPPED.name: 1.25}
"""Required speed relative to the peer."""
PORT = 29_500
SOURCES = str(Path(meseta.__file__).parent)


def measure_peer(
    hosts: Hosts, ranks: RankPool, shape: shapes.DlrmWorkload, layout: Layout, rate: str, options: Options
) -> bool:
    peers = find_peers(options.peer_python, enabled=True)
    if "TorchRec" not in peers.available:
        print(f"peer: left out; {next(one for one in peers.missing if one.startswith('TorchRec'))}")
        return True
    with start_ranks(layout.size, on_hosts(hosts, PORT), python=peers.python, sources=SOURCES) as peer_ranks:
        runs = ("fp32", "fp16", f"fp16{peer_training.PIPELINED}")
        peer_ranks.ask(peer_training.build, shape=asdict(shape), names=runs)
        own_variants = [Variant(), PAPER, OVERLAPPED]
        ranks.ask(training.build, shape=shape, layout=layout, variants=own_variants)
        ask = {one.name: asker(ranks, training.window, one.name) for one in own_variants}
        for name in runs:
            ask[f"TorchRec {name}"] = asker(peer_ranks, peer_training.window, name)
        measured = Measured()
        in_turns(ask, options.rounds, options.window_s, measured)
    rows, good = [], True
    best = min((f"TorchRec {name}" for name in runs[1:]), key=measured.step_s)
    pairs = {Variant().name: "TorchRec fp32", PAPER.name: "TorchRec fp16", OVERLAPPED.name: best}
    for name in ask:
        sent = sum(measured.link_bytes(name, layout)) / layout.hosts / 1e6
        theirs_s = measured.step_s(pairs[name]) if name in pairs else None
        ratio = "" if theirs_s is None else f"{theirs_s / measured.step_s(name):.2f}"
        least = LEAST.get(name)
        good &= least is None or (theirs_s or 0.0) >= least * measured.step_s(name)
        rows.append([name, f"{1e3 * measured.step_s(name):.0f}", f"{sent:.2f}", ratio, str(least or "")])
        if theirs_s is not None:
            options.record(
                f"{layout} {name}, {rate}", "step", measured.step_s(name), "s", peer=pairs[name], peer_value=theirs_s
            )
    head = ("", "step, ms", "MB a host and step", "times as fast as TorchRec", "at least")
    table(f"TorchRec ({best} is its best), {layout}, links of {rate}", head, rows)
    return good
