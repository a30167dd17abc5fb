"""Lists every candidate accelerator and why it was or was not chosen, for `ds_report`.

`current.py` makes the choice; this module only explains it. Listing the candidates imports the plugins of all of them.
A program with `DS_ACCELERATOR` set never imports the others.
"""

import os
import traceback
from dataclasses import dataclass
from typing import Literal

from deepspeed.accelerator.current import PLAIN, SET_BY_HAND, VARIABLE, AcceleratorChoice
from deepspeed.errors import stated
from deepspeed.plugins import Offer, plugin_manager

State = Literal["available", "absent", "broken", "blocked"]


@dataclass(frozen=True)
class Candidate:
    """An accelerator that is installed or registered by the program, or the plain device.

    Fields:
        name, priority, available, reason, impersonates: the fields of its `Offer`; the plain device has no priority.
        origin: the package, version and module of its entry point.
        api: its range of plugin API versions, or None.
        state: "absent" means that there is no device, "blocked" that the environment excludes the plugin.
        chosen: True for the current accelerator.
        verdict: why it won or lost, in one line.
        traceback: the traceback of the failure if `state` is "broken", else None.
    """

    name: str
    priority: int | None
    available: bool
    reason: str
    origin: str
    api: str | None
    state: State
    chosen: bool
    verdict: str
    traceback: str | None
    impersonates: str = ""


def list_candidates(choice: AcceleratorChoice | None) -> list[Candidate]:
    """Return all candidates, the best offer first and the plain device last.

    Args:
        choice: the current choice; None when no accelerator could be chosen.
    """
    offers = plugin_manager().offers()
    found = [_candidate(offer, offers, choice) for offer in offers]
    verdict = _plain_verdict(offers, choice)
    plain_won = choice is not None and choice.plugin is None and not _set_by_hand(choice)
    reason = "the CPU by torch alone; used when nothing else is available"
    return [*found, Candidate(PLAIN, None, True, reason, "ds-core", None, "available", plain_won, verdict, None)]


def _candidate(offer: Offer, offers: list[Offer], choice: AcceleratorChoice | None) -> Candidate:
    manager = plugin_manager()
    failure = manager.failure(offer.name)
    state: State = "available"
    if manager.refusal(offer.name):
        state, failure = "blocked", None
    elif failure is not None:
        state = "broken"
    elif not offer.available:
        state = "absent"
    return Candidate(
        name=offer.name,
        priority=offer.priority,
        available=offer.available,
        reason=offer.reason,
        origin=manager.origin(offer.name),
        api=manager.stated_api(offer.name),
        state=state,
        chosen=choice is not None and choice.plugin == offer.name,
        verdict=_verdict(offer, state, offers, choice),
        traceback=None if failure is None else "".join(traceback.format_exception(failure)).rstrip(),
        impersonates=offer.impersonates,
    )


def _verdict(offer: Offer, state: State, offers: list[Offer], choice: AcceleratorChoice | None) -> str:
    if choice is not None and choice.plugin == offer.name:
        return f"won: {choice.why}"
    by_rule = _rule_above_offers(choice)
    if by_rule is not None and by_rule != f"{VARIABLE}={offer.name}":
        return f"lost: {by_rule} beats every offer"
    if state != "available":
        return {"absent": "lost: its device is not here", "broken": "lost: it is broken", "blocked": "not asked"}[state]
    best = offers[0]
    claimants = [other for other in offers if other.available and other.device == offer.device and other != offer]
    if choice is None and claimants and best.device == offer.device:
        others = " and ".join(repr(other.name) for other in claimants)
        claim = "claims" if len(claimants) == 1 else "claim"
        return f"undecided: {others} {claim} torch's device {offer.device!r} too"
    rivals = [other.name for other in offers if other.available and other.priority == best.priority]
    if offer.priority < best.priority:
        return f"lost: priority {offer.priority} is below {best.priority} of {' and '.join(map(repr, rivals))}"
    others = " and ".join(repr(name) for name in rivals if name != offer.name)
    if choice is not None or not others:
        return "lost: the choice was made before it was there"
    return f"undecided: {others} {'offers' if len(rivals) == 2 else 'offer'} the same priority {offer.priority}"


def _plain_verdict(offers: list[Offer], choice: AcceleratorChoice | None) -> str:
    if choice is not None and choice.plugin is None and not _set_by_hand(choice):
        return f"won: {choice.why}"
    by_rule = _rule_above_offers(choice)
    if by_rule is not None:
        return f"lost: {by_rule} beats every offer"
    available = " and ".join(repr(offer.name) for offer in offers if offer.available)
    return f"lost: {available} can be used" if available else "lost"


def _rule_above_offers(choice: AcceleratorChoice | None) -> str | None:
    """Name the rule that decides before any offer is compared; return None if there is none."""
    if choice is not None and _set_by_hand(choice):
        return "set_accelerator"
    return stated(VARIABLE) if os.environ.get(VARIABLE, "").strip() else None


def _set_by_hand(choice: AcceleratorChoice) -> bool:
    return choice.why == SET_BY_HAND
