import subprocess
import sys

import pytest
from pydantic import ValidationError

from actors.learner.asynchrony_options import AsynchronyOptions


def test_defaults_are_synchronous_and_raise_no_doubt():
    options = AsynchronyOptions()
    assert (options.pipeline, options.max_staleness, options.partial) == ("step", 0, "off")
    assert (options.grad_tokens, options.half_life, options.publish_blend, options.sync_every) == ("all", None, 1.0, 1)
    assert options.doubts() == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"half_life": 0}, r"half_life=0 leaves no weight.*null to switch the decay off"),
        ({"half_life": -2.5}, r"half_life=-2\.5 leaves no weight"),
        ({"publish_blend": 0}, r"publish_blend=0 .* engines would never see an update"),
        ({"publish_blend": 1.1}, r"publish_blend=1\.1 .* at most 1"),
        ({"grad_tokens": "decay"}, r"grad_tokens=decay needs half_life"),
        ({"on_stale": "decay"}, r"on_stale=decay needs half_life"),
        (
            {"grad_tokens": "decay", "on_stale": "decay"},
            r"grad_tokens=decay and on_stale=decay needs half_life",
        ),
        (
            {"grad_tokens": "decay", "half_life": 30, "half_life_unit": "seconds"},
            r"tokens carry no times.*half_life_unit=versions",
        ),
        ({"partial": "split"}, r"partial=split .* max_staleness=0 forbids: set max_staleness to 1 or more"),
        ({"partial": "split", "max_staleness": 1, "on_interrupt": "drain"}, r"on_interrupt=drain forbids"),
        ({"partial": "split", "max_staleness": 1, "pipeline": "stream"}, r"nothing could be written while the learner"),
        ({"sync_every": 0}, r"sync_every"),
        ({"max_staleness": -1}, r"max_staleness"),
        ({"pipeline": "streams"}, r"'step' or 'stream'"),
    ],
)
def test_contradictions_are_explained(fields, message):
    with pytest.raises(ValidationError, match=message):
        AsynchronyOptions(**fields)


def test_all_contradictions_are_told_at_once():
    with pytest.raises(ValidationError, match=r"(?s)needs half_life.*max_staleness=0 forbids"):
        AsynchronyOptions(on_stale="decay", partial="split")


@pytest.mark.parametrize(
    ("fields", "doubt"),
    [
        ({"partial": "interrupt", "max_staleness": 2}, "pipeline=step"),
        ({"partial": "interrupt", "pipeline": "stream"}, "max_staleness=0"),
        ({"interrupt_at": "boundary"}, "without partial=interrupt"),
        ({"consumption": "freshest"}, "consumption=freshest has no effect"),
        ({"half_life": 4.0}, "half_life has no effect"),
        ({"publish_blend": 0.9}, "publish_blend=0.9 makes even a synchronous run off-policy"),
    ],
)
def test_settings_without_effect_are_doubted_not_refused(fields, doubt):
    (found,) = AsynchronyOptions(**fields).doubts()
    assert doubt in found


def test_boundary_doubts():
    common = {"pipeline": "stream", "max_staleness": 1, "partial": "interrupt", "interrupt_at": "boundary"}
    assert AsynchronyOptions(**common).doubts() == []
    assert "grace_tokens=0" in AsynchronyOptions(**common, grace_tokens=0).doubts()[0]
    assert "nothing is cut" in AsynchronyOptions(**common, on_interrupt="drain").doubts()[0]


@pytest.mark.parametrize(
    ("fields", "two"),
    [
        ({}, False),
        ({"partial": "interrupt", "on_interrupt": "drain"}, False),
        ({"partial": "split", "max_staleness": 1}, True),
        ({"pipeline": "stream"}, True),
        ({"pipeline": "stream", "partial": "interrupt"}, False),
        ({"pipeline": "stream", "partial": "interrupt", "on_interrupt": "keep_kv"}, False),
        ({"pipeline": "stream", "partial": "interrupt", "on_interrupt": "drain"}, True),
        ({"pipeline": "stream", "partial": "interrupt", "interrupt_at": "boundary"}, True),
    ],
)
def test_engines_hold_two_versions_only_where_rows_go_on_under_the_one_before(fields, two):
    assert AsynchronyOptions(**fields).holds_two_versions == two


def test_every_field_is_described():
    for name, field in AsynchronyOptions.model_fields.items():
        assert field.description, name
        assert len(field.description) > 30, name


def test_options_load_neither_torch_nor_ray():
    script = (
        "import sys, actors.learner.asynchrony_options\n"
        "loaded = {'torch', 'ray', 'transformers'} & set(sys.modules); assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
