import datetime
import decimal

import numpy as np
import pytest

from actors.reward.wire import FrameBuffer, WireError, encode


def test_frames_survive_any_cut_of_the_stream():
    messages = [{"a": 1}, {"text": "\u2211 \ud800"}, {}, {"b": [None, True, 0.1]}]
    stream = b"".join(encode(message) for message in messages)
    for size in (1, 3, 7, len(stream)):
        buffer = FrameBuffer()
        received = [m for start in range(0, len(stream), size) for m in buffer.feed(stream[start : start + size])]
        assert received == messages


def test_values_that_json_lacks_are_converted():
    sent = {
        "bytes": b"\x00\xff",
        "floats": np.array([[0.5, 1.5]], np.float32),
        "integer": np.int64(3),
        "strings": np.array(["a", "b"]),
        "byte_array": np.array([b"x"], dtype=object),
        "tuple": (1, 2),
        "set": {2, 1},
        "date": datetime.date(2024, 2, 29),
        "decimal": decimal.Decimal("12.50"),
    }
    (received,) = FrameBuffer().feed(encode(sent))
    assert received == {
        "bytes": b"\x00\xff",
        "floats": [[0.5, 1.5]],
        "integer": 3,
        "strings": ["a", "b"],
        "byte_array": [b"x"],
        "tuple": [1, 2],
        "set": [1, 2],
        "date": "2024-02-29",
        "decimal": "12.50",
    }


def test_value_that_cannot_be_converted_is_refused_with_its_type():
    with pytest.raises(TypeError, match=r"a value of type builtins\.object cannot be sent"):
        encode({"handle": object()})
    loop: dict = {}
    loop["self"] = loop
    with pytest.raises(ValueError, match="Circular"):
        encode(loop)


@pytest.mark.parametrize(
    ("garbage", "message"),
    [
        (b"Traceback (most recent call last)", "a frame of [0-9]+ bytes"),
        (b"\x00\x00\x00\x03abc", "not JSON"),
        (b"\x00\x00\x00\x04\xff\xfe\xfd\xfc", "not JSON"),
        (b"\x00\x00\x00\x02[]", "not a JSON object"),
        (b"\x00\x00\x00\x00", "not JSON"),
    ],
)
def test_garbage_is_refused(garbage, message):
    with pytest.raises(WireError, match=message):
        FrameBuffer().feed(garbage)
