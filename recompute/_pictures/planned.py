"""A plan as events, so that it can be drawn as a run of a cache is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recompute.events import Added, Event, Evicted, Performed

if TYPE_CHECKING:
    from recompute._plans.schedule import ProgramPlan
    from recompute._traces.program import Program


def plan_events(program: Program, plan: ProgramPlan) -> list[Event]:
    """What a cache that followed the plan would tell. Storages have the program's numbers; times are in its units."""
    sizes, storages = program.sizes, program.storages
    events: list[Event] = []
    resident: set[int] = set()
    ran: set[int] = set()
    used, now = 0, 0.0

    for value, maker in enumerate(program.makers):
        storage = storages[value]
        if maker < 0 and storage not in resident:
            resident.add(storage)
            used += sizes[storage]
            events.append(Added(now, used, storage, sizes[storage], program.devices[storage]))
    for kind, which in plan.steps:
        if kind == "compute":
            call = program.calls[which]
            made = tuple(dict.fromkeys(storages[value] for value in call.results))
            used += sum(sizes[storage] for storage in made if storage not in resident)
            resident.update(made)
            now += call.cost
            events.append(
                Performed(
                    now,
                    used,
                    call.name,
                    call.cost,
                    which in ran,
                    made,
                    tuple([sizes[storage] for storage in made]),
                    tuple(dict.fromkeys(storages[value] for value in call.arguments)),
                )
            )
            ran.add(which)
        else:
            resident.discard(which)
            used -= sizes[which]
            events.append(Evicted(now, used, which, sizes[which], "request"))
    return events
