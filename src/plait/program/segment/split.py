"""Take a local graph apart into what each stage of a pipeline does, and the messages between stages.

In: a local graph, the stages of the global nodes that its nodes stand for. Out: per stage, the nodes of its forward and
of its backward (those that earlier stages wait for, and those that only make gradients of parameters), and per pair of
stages one forward and one backward message. Only what somebody needs is kept.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from plait.errors import ProgramError
from plait.graph.storage import is_item
from plait.program.local.local_graph import LocalGraph
from plait.program.stage.schedules.messages import Direction
from plait.program.stage.where import Stages


@dataclass(frozen=True, kw_only=True, slots=True)
class StageGraph:
    """One stage's part of a micro-batch."""

    stage: int
    forward: tuple[fx.Node, ...]
    """In order."""
    backward: tuple[fx.Node, ...]
    """In order: `inputs` and `weights` together."""
    inputs: tuple[fx.Node, ...]
    """What earlier stages wait for, and whatever leads there."""
    weights: tuple[fx.Node, ...]
    """What only gradients of parameters need."""
    sends: Mapping[tuple[Direction, int], tuple[str, ...]]
    """(direction, to which stage) -> local names in one message."""
    receives: Mapping[tuple[Direction, int], tuple[str, ...]]
    """(direction, from which stage) -> local names in one message."""
    gradients: Mapping[str, str]
    """Parameter name -> local node."""
    new_buffers: Mapping[str, str]
    """Buffer name -> local node, of the buffers that this stage changes."""
    has_total: bool
    """Whether the loss is computed here."""


@dataclass(slots=True)
class _Demand:
    """What one stage must compute, send and receive."""

    nodes: set[fx.Node] = field(default_factory=set)
    sends: dict[tuple[Direction, int], dict[str, None]] = field(default_factory=dict)
    receives: dict[tuple[Direction, int], dict[str, None]] = field(default_factory=dict)


def split(local: LocalGraph, stages: Stages, ranks: int) -> tuple[StageGraph, ...]:
    """What every stage does; stage s is on rank s % `ranks`, which is told nothing twice."""
    return _once_a_rank(_Splitter(local, stages).run(), ranks)


def _once_a_rank(parts: Sequence[StageGraph], ranks: int) -> tuple[StageGraph, ...]:
    """Take out of messages what the receiving rank has from an earlier stage of its own, received or computed."""
    if len(parts) <= ranks:
        return tuple(parts)
    at_hand: list[set[str]] = [set() for _ in range(ranks)]
    wanted: dict[tuple[Direction, int, int], tuple[str, ...]] = {}
    directions: tuple[Direction, ...] = ("forward", "backward")
    for direction in directions:  # a micro-batch is done with the first before a rank begins with the second
        for part in parts if direction == "forward" else reversed(parts):
            have = at_hand[part.stage % ranks]
            for (way, source), names in part.receives.items():
                if way == direction:
                    other = source % ranks != part.stage % ranks
                    wanted[way, source, part.stage] = tuple(n for n in names if not (other and n in have))
                    have |= set(names)
            have |= {node.name for node in (part.forward if direction == "forward" else part.backward)}
    return tuple(
        replace(
            part,
            sends={key: kept for key in part.sends if (kept := wanted[key[0], part.stage, key[1]])},
            receives={key: kept for key in part.receives if (kept := wanted[key[0], key[1], part.stage])},
        )
        for part in parts
    )


class _Splitter:
    def __init__(self, local: LocalGraph, stages: Stages) -> None:
        self.local = local
        self.stages = stages
        by_name = {node.name: found for node, found in stages.of.items()}
        everywhere = tuple(range(stages.num_stages))
        self.order = {node: index for index, node in enumerate(local.graph.nodes)}
        self.by_name = {node.name: node for node in local.graph.nodes}
        self.runs = {
            node: by_name.get(node.meta.get("lowers", ""), everywhere) or everywhere
            for node in local.graph.nodes
            if node.op == "call_function"
        }
        self.demands = [_Demand() for _ in everywhere]

    def run(self) -> tuple[StageGraph, ...]:
        last = self.stages.num_stages - 1
        total = self.by_name[self.local.total]
        home = self._home(total, last)
        self._need(total, home)
        self._need(self.by_name[self.local.weight], home)
        for by_stage in self.local.parts.values():
            for stage, name in by_stage.items():
                self._need(self.by_name[name], stage)
        for buffer, name in self.local.new_buffers.items():
            self._need(self.by_name[name], self.stages.buffers[buffer])
        return tuple(self._stage(stage, stage == home) for stage in range(self.stages.num_stages))

    def _home(self, node: fx.Node, otherwise: int) -> int:
        return max(self.runs[node]) if node in self.runs else otherwise

    def _need(self, node: fx.Node, stage: int) -> None:
        stack = [(node, stage)]
        while stack:
            current, at = stack.pop()
            if current.op != "call_function":
                continue
            if at not in self.runs[current]:
                source = self._send(current, at)
                stack.append((current, source))
            elif current not in self.demands[at].nodes:
                self.demands[at].nodes.add(current)
                stack += [(used, at) for used in current.all_input_nodes]

    def _send(self, node: fx.Node, to: int) -> int:
        before = [stage for stage in self.runs[node] if stage < to]
        source = max(before) if before else min(self.runs[node])
        direction: Direction = "forward" if source < to else "backward"
        if direction == "forward" and node.meta["phase"] == "backward":
            raise ProgramError(
                f"{node.name} of stage {source}'s backward is read by stage {to}, which comes before.",
                fix="begin stages elsewhere (pipe.cut names the modules), or use zero3, which cuts parameters alone.",
            )
        self.demands[source].sends.setdefault((direction, to), {})[node.name] = None
        self.demands[to].receives.setdefault((direction, source), {})[node.name] = None
        return source

    def _stage(self, stage: int, is_home: bool) -> StageGraph:
        demand = self.demands[stage]
        nodes = sorted(demand.nodes, key=self.order.__getitem__)
        late = self._late(nodes, demand)
        forward = [node for node in nodes if node not in late]
        backward = [node for node in nodes if node in late]
        sent = {
            name
            for (direction, _), names in demand.sends.items()
            if direction == "backward"
            for name in names
        }
        weights = only_for_gradients(backward, self._belongs, sent)
        return StageGraph(
            stage=stage,
            forward=tuple(forward),
            backward=tuple(backward),
            inputs=tuple(node for node in backward if node not in weights),
            weights=tuple(node for node in backward if node in weights),
            sends={key: self._sorted(names) for key, names in sorted(demand.sends.items())},
            receives={key: self._sorted(names) for key, names in sorted(demand.receives.items())},
            gradients={
                name: by_stage[stage] for name, by_stage in self.local.parts.items() if stage in by_stage
            },
            new_buffers={
                buffer: name
                for buffer, name in self.local.new_buffers.items()
                if self.stages.buffers[buffer] == stage
            },
            has_total=is_home,
        )

    def _late(self, nodes: Sequence[fx.Node], demand: _Demand) -> set[fx.Node]:
        """The backward's, and views that it makes again of what a later stage has computed."""
        come = {
            name
            for (direction, _), names in demand.receives.items()
            if direction == "backward"
            for name in names
        }
        late: set[fx.Node] = set()
        for node in nodes:
            reads_late = any(used in late or used.name in come for used in node.all_input_nodes)
            if node.meta["phase"] == "backward" or reads_late:
                late.add(node)
        return late

    def _sorted(self, names: Mapping[str, None]) -> tuple[str, ...]:
        return tuple(sorted(names, key=lambda name: self.order[self.by_name[name]]))

    def _belongs(self, reader: fx.Node, node: fx.Node) -> bool:
        """To the same forward op; or to one that reads parameters alone, such as the transpose of a weight."""
        own = reader.meta.get("origin", "")
        return own == node.meta.get("origin", "") or own in self.stages.of_parameters


def only_for_gradients(
    backward: Sequence[fx.Node], belongs: Callable[[fx.Node, fx.Node], bool], sent: Collection[str] = ()
) -> set[fx.Node]:
    """Ops of a backward, given in order, that nothing but gradients of parameters needs.

    They are not `sent`, and all their readers are such ops too and belong with them: `belongs(reader, node)`.
    """
    inside, found = set(backward), set[fx.Node]()
    for node in reversed(backward):
        readers = [user for user in node.users if user in inside]
        if node.name not in sent and all(user in found and belongs(user, node) for user in readers):
            found.add(node)
    return {node for node in found if not is_item(node) or node.args[0] in found}  # with the op that makes it
