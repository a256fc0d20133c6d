"""What one rank sends another is received in the order in which it is sent: links need no names for messages."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from tests.unit.program.compiled import with_instructions
from tests.unit.program.exact_programs import compiled

from plait.errors import ProgramError
from plait.program.check.soundness import check_program
from plait.program.instructions import Recv, Send
from plait.program.program import Program
from plait.program.stage.schedules import SCHEDULES
from plait.program.stage.schedules.messages import Inbox, Message
from plait.program.write.pipeline import PipelineWriter

PLANS: Mapping[str, tuple[str, str, dict[str, int], dict[str, object]]] = {
    "gpipe": ("mlp", "gpipe", {"pipe": 3}, {}),
    "1f1b x data, tied": ("gpt_tied", "1f1b", {"pipe": 2, "data": 2}, {}),
    "interleaved": ("gpt_tied", "interleaved", {"pipe": 2}, {}),
    "interleaved x data": ("gpt_tied", "interleaved", {"pipe": 2, "data": 2}, {}),
    "interleaved with skip connections": ("moe_capacity", "interleaved", {"pipe": 2}, {}),
    "interleaved over 3 ranks": ("unet", "interleaved", {"pipe": 3}, {}),
    "zero-bubble with skip connections": ("unet", "zero-bubble", {"pipe": 3}, {}),
    "zero-bubble-2": ("mlp", "zero-bubble", {"pipe": 3}, {"pipe": {"schedule": "zero-bubble-2"}}),
    "pipedream": ("mlp", "pipedream", {"pipe": 3}, {}),
}


def orders(program: Program) -> dict[tuple[int, int], tuple[list[str], list[str]]]:
    """Sender, receiver -> messages as they are sent, and as there is room for them."""
    found: dict[tuple[int, int], tuple[list[str], list[str]]] = {}
    mesh = program.plan.mesh
    for rank in range(mesh.size):
        for i in program.of(rank).instructions:
            if isinstance(i, Send):
                found.setdefault((rank, mesh.group(rank, i.axis)[i.to]), ([], []))[0].append(i.message)
            elif isinstance(i, Recv):
                found.setdefault((mesh.group(rank, i.axis)[i.source], rank), ([], []))[1].append(i.message)
    return found


@pytest.mark.parametrize("case", PLANS)
def test_every_plan_receives_in_the_order_of_its_senders(case: str) -> None:
    name, plan, mesh, settings = PLANS[case]
    program = compiled(name, plan, mesh, 6, 6, settings)
    found = orders(program)
    assert found
    for sent, received in found.values():
        assert sent == received


def test_as_they_are_needed_is_not_as_they_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank with two stages: what skips to its second stage is sent long before that is reached."""
    monkeypatch.setattr(Inbox, "up_to", lambda self, message: [] if message in self._asked else [message])
    monkeypatch.setattr(PipelineWriter, "_receive", _asked(PipelineWriter._receive))
    with pytest.raises(ProgramError, match="messages between two ranks are received in the order in which"):
        compiled("moe_capacity", "interleaved", {"pipe": 2}, 3, 3)


def _asked(receive: Callable[[PipelineWriter, Message], int]) -> Callable[[PipelineWriter, Message], int]:
    def receives(self: PipelineWriter, message: Message) -> int:
        self.inbox._asked.add(message)
        return receive(self, message)

    return receives


def test_two_receives_in_the_wrong_order() -> None:
    program = compiled("mlp", "gpipe", {"pipe": 2}, 4, 4)
    own = list(program.classes[1].instructions)
    first, second = [i for i in own if isinstance(i, Recv)][:2]
    sends = [i for i in program.classes[0].instructions if isinstance(i, Send)]
    swapped = {first.id: replace(second, id=first.id), second.id: replace(first, id=second.id)}
    planted = with_instructions(program, [swapped.get(i.id, i) for i in own], 1)
    with pytest.raises(ProgramError) as raised:
        check_program(planted)
    assert f"rank 0 sends {first.message!r} to rank 1 in instruction {sends[0].id}" in raised.value.what
    assert f"expects {second.message!r} next" in raised.value.what


def test_an_inbox_asks_for_what_comes_before_and_for_nothing_twice() -> None:
    schedule = SCHEDULES["gpipe"](2, 1, 3)
    messages = [Message("forward", 0, 1, number) for number in range(3)]
    inbox = Inbox(reversed(messages), schedule)
    assert inbox.up_to(messages[1]) == messages[:2]
    assert inbox.up_to(messages[0]) == []
    assert inbox.up_to(messages[2]) == messages[2:]
