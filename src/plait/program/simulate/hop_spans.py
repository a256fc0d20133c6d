"""The messages of collectives that are made hop by hop, in a simulated timeline as in a measured one.

In: a trace in which each collective is one bar, its program. Out: the same trace with a span for every message that a
rank receives, within the bar. No time changes.
"""

from dataclasses import replace

from plait.program.hops.algorithms import rounds_of
from plait.program.hops.price import BACKEND, Network, algorithm_of, round_times
from plait.program.hops.rounds import named
from plait.program.instructions import Collective
from plait.program.program import Program
from plait.trace.span import Span, Trace

_HOPS = 950_000_000
"""Ids of spans that are messages of collectives start here, as in a measured trace."""


def with_hops(trace: Trace, program: Program, network: Network) -> Trace:
    """The trace, with messages where the plan has collectives made of them."""
    plan = program.plan
    if not plan.links.by_hops:
        return trace
    collectives = {
        rank: {i.id: i for i in program.of(rank).instructions if isinstance(i, Collective)}
        for rank in trace.ranks
    }
    found = list(trace.spans)
    for span in trace.spans:
        collective = collectives[span.rank].get(span.instruction)
        if collective is not None and span.kind == "communication":
            found += _hops(
                span, collective, plan.mesh.group(span.rank, collective.axis), plan.links.algorithm, network
            )
    return replace(trace, spans=tuple(found))


def _hops(
    span: Span, collective: Collective, group: tuple[int, ...], asked: str, network: Network
) -> list[Span]:
    algorithm = algorithm_of(asked, collective, group, network)
    if algorithm == BACKEND:
        return []
    rounds = rounds_of(collective.op, algorithm, len(group), hosts=network.hosts_of(group))
    times = round_times(rounds, collective.num_bytes, group, network)
    own, at_s, found = group.index(span.rank), span.end_s - sum(times), []
    for number, (hops, seconds) in enumerate(zip(rounds, times, strict=True)):
        start_s = min(max(at_s, span.start_s), span.end_s)
        end_s = min(max(at_s + seconds, start_s), span.end_s)
        found += [
            replace(
                span,
                instruction=_HOPS + number,
                name=named(number, hop),
                start_s=start_s,
                end_s=end_s,
                num_bytes=0,
            )
            for hop in hops
            if hop.to == own and hop.blocks
        ]
        at_s += seconds
    return found
