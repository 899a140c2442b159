"""What is left of a replay when it is over: nothing."""

from __future__ import annotations

from weakref import ref

import pytest

from recompute._engine.events import Event, Pinned
from recompute._simulator.published_replay import PublishedReplay
from recompute._simulator.replay import Replay
from recompute._traces.chain import chain
from recompute.simulator import simulate


@pytest.mark.parametrize(("kind", "policy"), [(Replay, "default"), (PublishedReplay, "dtr-eq")])
def test_a_replay_goes_with_its_last_reference(kind: type[Replay | PublishedReplay], policy: str) -> None:
    """Interrupted or not, it does not wait for the collector, which would take its cache away at the same time."""

    def interrupt(steps: int) -> None:
        if steps:
            raise KeyboardInterrupt

    done, cut = (kind(chain(500), {"cpu": 50}, policy=policy, limit=9.0) for _ in range(2))
    assert done.run() == "ok"
    with pytest.raises(KeyboardInterrupt):
        cut.run(interrupt)
    left = [ref(done), ref(cut)]
    del done, cut
    assert [reference() for reference in left] == [None, None]


def test_a_listener_hears_the_replay_and_no_more() -> None:
    """Not that its last values go afterwards."""
    events: list[Event] = []
    run = simulate(chain(20), 8, listener=events.append)
    assert run.overhead is not None
    assert events[-1].time == pytest.approx(run.total_time)
    assert isinstance(events[-1], Pinned)
