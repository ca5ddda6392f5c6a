"""Events from bytes: however a stream of requests is cut, it reads the same; and what is read is bounded."""

from __future__ import annotations

import gc
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from weft.server.http.reader import MAX_UPGRADES, Event, Head, HttpReader, Mark

UPGRADE = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
CHUNKED = b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
REQUESTS = [
    b"GET /a?b=c HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\r\n\r\nPOST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\nhello",
    CHUNKED + b"3;x=y\r\nabc\r\n2\r\nde\r\n0\r\nlate: yes\r\n\r\n",
    f"POST /a HTTP/1.1\r\nHost: x\r\n{UPGRADE}Content-Length: 5\r\n\r\nhello".encode(),
    b"GET /old HTTP/1.0\r\n\r\n",
    b"nonsense\r\n\r\n",
]


def joined(events: list[Event]) -> list[Event]:
    """Events with neighbouring parts of a body made one, and repeated marks left out."""
    found: list[Event] = []
    for event in events:
        if isinstance(event, bytes) and found and isinstance(found[-1], bytes):
            found[-1] += event
        elif event is not Mark.HEAD_BEGUN or found[-1:] != [Mark.HEAD_BEGUN]:
            found.append(event)
    return found


@settings(deadline=None, max_examples=200, database=None)
@given(
    st.lists(st.sampled_from(REQUESTS), min_size=1, max_size=4)
    | st.integers(1, 9).map(lambda count: REQUESTS[3:4] * count),
    st.lists(st.integers(0, 600), max_size=30),
)
def test_a_stream_of_requests_reads_the_same_however_it_is_cut(requests, cuts):
    sent = b"".join(requests)
    whole = HttpReader(10_000)
    expected = joined(whole.feed(sent))
    places = sorted({0, len(sent), *(cut for cut in cuts if cut < len(sent))})
    cut = HttpReader(10_000)
    events: list[Event] = []
    for begin, end in pairwise(places):
        if cut.fault is None:
            events += cut.feed(sent[begin:end])
    assert joined(events) == expected
    assert cut.fault == whole.fault


def test_a_request_is_read_whole():
    begun, head, body, ended = HttpReader(1000).feed(REQUESTS[1])
    assert (begun, body, ended) == (Mark.HEAD_BEGUN, b"hello", Mark.REQUEST_ENDED)
    assert isinstance(head, Head)
    assert (head.method, head.path, head.query, head.version) == ("POST", b"/a", b"", "1.1")
    assert (b"content-length", b"5") in head.headers
    assert head.keep_alive
    assert head.expects_continue


def heads_of(reader: HttpReader, chunks: list[bytes]) -> int:
    """Return the number of requests that a reader finds before it refuses to read on."""
    found = 0
    for chunk in chunks:
        if reader.fault is None:
            found += sum(isinstance(event, Head) for event in reader.feed(chunk))
    return found


def test_a_connection_may_ask_for_another_protocol_a_few_times_however_it_is_cut():
    for chunks in ([REQUESTS[3] * 4000], [REQUESTS[3]] * 4000, [REQUESTS[3] * 3] * 4000):
        reader = HttpReader(1000)
        assert heads_of(reader, chunks) == MAX_UPGRADES
        assert reader.fault is not None
    patient = HttpReader(1000)
    assert (
        heads_of(patient, [REQUESTS[3], *[REQUESTS[0]] * 50, *[REQUESTS[3]] * (MAX_UPGRADES - 1)]) == 50 + MAX_UPGRADES
    )
    assert patient.fault is None


def test_what_is_neither_head_nor_body_is_bounded_wherever_it_stands():
    for begun in (b"", b"GET /", b"GET / HTTP/1.1\r\nx: ", CHUNKED, CHUNKED + b"1;x=", CHUNKED + b"0\r\nx: "):
        reader = HttpReader(1000)
        reader.feed(begun)
        byte = b"\r\n" if begun == b"" else b"0"
        taken = 0
        while reader.fault is None and taken < 10_000:
            taken += len(byte)
            reader.feed(byte)
        assert reader.fault is not None, begun
        assert reader.fault[0] == 431 or begun == CHUNKED


def test_a_reader_keeps_nothing_of_a_body_that_it_has_returned():
    """It lives until the next garbage collection, and so would the body."""
    reader = HttpReader(4096)
    events = reader.feed(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9000\r\n\r\n" + b"x" * 8000)
    part = events.pop()
    assert len(part) == 8000
    assert [each for each in gc.get_referrers(part) if isinstance(each, list)] == []
