"""Drafts are switched off and on while rows are written."""

from tests.actors.rollout.test_draft_sources import ANSWER, PROMPT, pack_of, past, table


def following(drafts):
    drafts.write(0, ANSWER[:4])
    return drafts.draft(0)


def opened(source="history", **options):
    rows = table(source, **options)
    rows.source.add_pack(pack_of(past(ANSWER)))
    return rows


def test_switched_off_nothing_is_drafted_and_on_again_it_is():
    rows = opened()
    rows.open(0, 1)
    assert following(rows) == ANSWER[4:12]
    rows.source.switch(False, "always")
    assert rows.draft(0) == []
    assert rows.source.gate_reason == "off: switched off while the run goes on"
    rows.source.switch(True, "always")
    assert rows.draft(0) == ANSWER[4:12]
    assert rows.source.gate_reason == "always open"


def test_switched_off_no_previous_answer_is_reused():
    from storage.history.schema import prompt_hash

    for on in (False, True):
        rows = opened("previous_epoch", verify="lenient", fresh_share=0.0)
        rows.source.register(1, prompt_hash(PROMPT), 0)
        rows.source.switch(on, "always")
        assert rows.open(0, 1) is on


def test_another_gate_begins_with_a_probe():
    rows = opened()
    rows.open(0, 1)
    rows.write(0, ANSWER[:4])
    rows.source.switch(True, "auto")
    rows.draft(0)
    assert rows.source.gate_reason == "on: trying drafts out"
