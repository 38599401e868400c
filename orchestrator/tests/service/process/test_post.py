"""The post: what arrives, what is refused, and that nobody waits."""

import threading
import time

import pytest
import zmq
from service_kit_process import LONG, SECRET, Heard, until

from orchestrator.service.messages import Book, Leave, Pixels, encode
from orchestrator.service.post import post as post_module
from orchestrator.service.post.post import Post
from orchestrator.service.post.wire import mac_of


@pytest.fixture
def make():
    """Posts with their inboxes, closed in the end."""
    posts = []

    def make(secret=SECRET, **options):
        heard = Heard()
        post = Post(heard, secret=secret, **options)
        posts.append(post)
        return post, heard

    yield make
    for post in posts:
        post.close()


@pytest.fixture
def raw():
    """A socket that speaks to a post without being one."""
    context = zmq.Context()
    sockets = []

    def connect(address):
        push = context.socket(zmq.PUSH)
        push.connect(address)
        sockets.append(push)
        return push

    yield connect
    for push in sockets:
        push.close(0)
    context.term()


def leave(number=0):
    return Leave("someone", number, 1.5)


def letter(to=b"b", message=None, secret=SECRET):
    payload = encode(message or leave())
    return [to, payload, mac_of(secret, to, payload)]


def test_delivers(make):
    (a, _), (b, heard) = make(), make()
    a.know({"b": b.address})
    assert a.send("b", leave()) and a.send("b", Book(3, {"x": "y"}))
    until(lambda: len(heard.messages) == 2)
    assert heard.messages == [("b", leave()), ("b", Book(3, {"x": "y"}))]
    assert a.counts["sent"] == 2 and b.counts["received"] == 2


def test_both_ways_and_several_names(make):
    (a, at_a), (b, at_b) = make(), make()
    for post in (a, b):
        post.know({"entry": a.address, "supervisor": a.address, "b": b.address})
    b.send("entry", leave(1))
    b.send("supervisor", leave(2))
    a.send("b", leave(3))
    until(lambda: len(at_a.messages) == 2 and len(at_b.messages) == 1)
    assert sorted(to for to, _ in at_a.messages) == ["entry", "supervisor"]


def test_a_party_of_the_same_process(make):
    a, heard = make()
    a.know({"a": a.address})
    message = leave()
    assert a.send("a", message)
    until(lambda: heard.messages)
    assert heard.messages[0][1] is message and a.counts["sent"] == 0


def test_unknown_name(make):
    a, _ = make()
    assert not a.send("nobody", leave())
    assert a.counts["dropped: unknown"] == 1


def test_large_payload(make):
    (a, _), (b, heard) = make(), make()
    a.know({"b": b.address})
    payload = bytes(range(256)) * (8 << 12)  # 8 MiB
    assert a.send("b", Pixels("d", payload))
    until(lambda: heard.messages)
    assert heard.messages[0][1].payload == payload


def test_too_large_a_message(make, monkeypatch):
    (a, _), (b, heard) = make(), make()
    a.know({"b": b.address})
    monkeypatch.setattr(post_module, "MOST_BYTES", 1000)
    assert not a.send("b", Pixels("d", bytes(1000)))
    assert a.counts["dropped: too large"] == 1
    assert a.send("b", leave())
    until(lambda: heard.messages)


@pytest.mark.parametrize(
    "change",
    [
        lambda f: f[:2],
        lambda f: [f[0]],
        lambda f: [b""],
        lambda f: [*f, b""],
        lambda f: [f[0], f[1][:-1], f[2]],
        lambda f: [f[0], f[1] + b"\0", f[2]],
        lambda f: [f[0], f[1], f[2][:-1]],
        lambda f: [f[0], f[1], b""],
        lambda f: [b"c", f[1], f[2]],
        lambda f: [f[0] + f[1][:1], f[1][1:], f[2]],
        lambda f: letter(secret=b"another secret of 32 bytes......"),
    ],
)
def test_what_does_not_verify(make, raw, change):
    b, heard = make()
    push = raw(b.address)
    push.send_multipart(change(letter()))
    push.send_multipart(letter())  # what is sound goes on arriving
    until(lambda: heard.messages)
    assert [m for _, m in heard.messages] == [leave()]
    assert b.counts["forged"] == 1 and b.counts["received"] == 1


def test_every_bit_counts(make, raw):
    b, heard = make()
    push = raw(b.address)
    frames = letter()
    flipped = 0
    for part in range(3):
        for byte in range(len(frames[part])):
            torn = list(frames)
            torn[part] = bytes(v ^ (1 << byte % 8 if i == byte else 0) for i, v in enumerate(frames[part]))
            push.send_multipart(torn)
            flipped += 1
    until(lambda: b.counts["forged"] == flipped)
    assert not heard.messages


def test_what_verifies_and_is_no_message(make, raw):
    b, heard = make()
    push = raw(b.address)
    for payload in (b"", b"\xc1", b"hello", b"\x81\xa4type\xa4None"):
        push.send_multipart([b"b", payload, mac_of(SECRET, b"b", payload)])
    name = b"\xff\xfe"
    payload = encode(leave())
    push.send_multipart([name, payload, mac_of(SECRET, name, payload)])
    push.send_multipart(letter())
    until(lambda: heard.messages)
    assert b.counts["broken"] == 5 and len(heard.messages) == 1


def test_bytes_that_are_no_zmq(make):
    import socket

    b, heard = make()
    host, port = b.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as stream:
        stream.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
    (a, _) = make()
    a.know({"b": b.address})
    a.send("b", leave())
    until(lambda: heard.messages)


def test_wrong_secret_between_posts(make):
    (a, _), (b, heard) = make(secret=b"x" * 32), make()
    a.know({"b": b.address})
    assert a.send("b", leave())
    until(lambda: b.counts["forged"])
    assert not heard.messages


@pytest.mark.parametrize("secret", [b"", b"short", b"x" * 65])
def test_secrets_that_cannot_be(secret):
    with pytest.raises(ValueError, match="secret"):
        Post(lambda to, message: None, secret=secret)


@pytest.mark.parametrize("host", ["0.0.0.0", "203.0.113.7", "no such host.invalid"])
def test_hosts_that_cannot_be(host):
    with pytest.raises(ValueError, match="host"):
        Post(lambda to, message: None, secret=SECRET, host=host)


def test_taken_port(make):
    a, _ = make()
    with pytest.raises(ValueError, match="cannot listen"):
        make(port=int(a.address.rsplit(":", 1)[1]))


def test_a_peer_that_comes_back_at_another_address(make):
    (a, _), (b, before) = make(), make()
    a.know({"b": b.address})
    a.send("b", leave(1))
    until(lambda: before.messages)
    b.close()
    a.send("b", leave(2))  # to nobody
    c, after = make()
    a.know({"b": c.address})
    assert a.send("b", leave(3))
    until(lambda: after.messages)
    assert [m.life for _, m in after.messages] == [3]  # what waited for the old one is dropped
    assert len(before.messages) == 1


def test_a_peer_that_comes_back_at_the_same_address(make):
    (a, _), (b, _) = make(), make()
    a.know({"b": b.address})
    b.close()
    c, after = make(port=int(b.address.rsplit(":", 1)[1]))
    until(lambda: a.send("b", leave()) and after.messages)
    assert c.counts["received"] >= 1


def test_a_full_queue_drops_and_never_waits(make, monkeypatch):
    from orchestrator.service.post import queue as post_queue

    monkeypatch.setattr(post_queue, "MOST_MESSAGES", 50)
    a, _ = make()
    silent = zmq.Context()
    pull = silent.socket(zmq.PULL)
    try:
        pull.setsockopt(zmq.RCVHWM, 1)
        pull.setsockopt(zmq.RCVBUF, 4096)
        port = pull.bind_to_random_port("tcp://127.0.0.1")
        a.know({"b": f"tcp://127.0.0.1:{port}", "never": "tcp://127.0.0.1:9"})
        longest, taken = 0.0, 0
        payload = bytes(1 << 20)
        while a.counts["dropped: full"] < 100 and taken < 5000:
            began = time.monotonic()
            taken += a.send("b", Pixels("d", payload))
            longest = max(longest, time.monotonic() - began)
        assert a.counts["dropped: full"] >= 100
        assert sum(a.send("never", leave()) for _ in range(200)) == 50
        assert longest < 10  # a stalled machine is no failure, an eternal wait is
    finally:
        pull.close(0)
        silent.term()


def test_bytes_that_wait_are_bounded(make, monkeypatch):
    from orchestrator.service.post import queue as post_queue

    monkeypatch.setattr(post_queue, "MOST_BYTES", 100_000)
    a, _ = make()
    a.know({"never": "tcp://127.0.0.1:9"})
    assert [a.send("never", Pixels("d", bytes(40_000))) for _ in range(4)] == [True, True, False, False]
    assert a.counts["dropped: full"] == 2


def test_what_waits_too_long_is_dropped(make, monkeypatch):
    from orchestrator.service.post import queue as post_queue

    monkeypatch.setattr(post_queue, "MOST_AGE", 0.01)
    a, _ = make()
    a.know({"never": "tcp://127.0.0.1:9"})
    assert a.send("never", leave())
    until(lambda: a.counts["dropped: late"] == 1)


def test_an_address_that_is_none(make):
    (a, _), (b, heard) = make(), make()
    a.know({"bad": "nonsense", "b": b.address})
    a.send("bad", leave())
    assert a.send("b", leave())
    until(lambda: heard.messages)
    until(lambda: a.counts["dropped: no address"])


def test_an_inbox_that_raises(make):
    heard = []

    def inbox(to, message):
        heard.append(message)
        raise RuntimeError("inbox")

    b = Post(inbox, secret=SECRET)
    try:
        a, _ = make()
        a.know({"b": b.address})
        a.send("b", leave(1))
        a.send("b", leave(2))
        until(lambda: len(heard) == 2)
        until(lambda: b.counts["dropped: inbox"] == 2)
    finally:
        b.close()


def test_close_with_pending(make):
    a, _ = make()
    a.know({"never": "tcp://127.0.0.1:9", "a": a.address})
    for number in range(100):
        a.send("never", leave(number))
    a.close()
    assert not a._thread.is_alive()
    assert a.counts["dropped: closed"] == 100
    assert not a.send("never", leave()) and not a.send("a", leave())
    a.close()


def test_close_flushes(make):
    (a, _), (b, heard) = make(), make()
    a.know({"b": b.address})
    for number in range(500):
        assert a.send("b", leave(number))
    a.close(flush=LONG)
    until(lambda: len(heard.messages) == 500)
    assert [m.life for _, m in heard.messages] == list(range(500))


def test_close_in_the_inbox():
    post = Post(lambda to, message: post.close(), secret=SECRET)
    post.know({"a": post.address})
    post.send("a", leave())
    post._thread.join(LONG)
    assert not post._thread.is_alive()


def test_from_many_threads(make):
    (a, at_a), (b, at_b) = make(), make()
    for post in (a, b):
        post.know({"a": a.address, "b": b.address})

    def send(number):
        for i in range(200):
            until(lambda i=i: a.send("b", leave(1000 * number + i)))
            until(lambda i=i: a.send("a", leave(1000 * number + i)))

    threads = [threading.Thread(target=send, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    until(lambda: len(at_a.messages) == len(at_b.messages) == 1600)
    for heard in (at_a, at_b):
        numbers = [m.life for _, m in heard.messages]
        assert len(set(numbers)) == 1600
        for n in range(8):  # of one sender, in order
            of = [x for x in numbers if x // 1000 == n]
            assert of == sorted(of)


def test_books_change_while_messages_go(make):
    a, _ = make()
    peers = [make() for _ in range(4)]
    stop = threading.Event()

    def change():
        number = 0
        while not stop.is_set():
            number += 1
            a.know({"b": peers[number % 4][0].address})
            time.sleep(0.001)  # or no letter would live long enough to go

    thread = threading.Thread(target=change)
    thread.start()
    try:
        until(lambda: a.send("b", leave()) is not None and sum(len(h.messages) for _, h in peers) > 200)
    finally:
        stop.set()
        thread.join(LONG)
    a.know({"b": peers[0][0].address})
    count = len(peers[0][1].messages)
    until(lambda: a.send("b", leave()) and len(peers[0][1].messages) > count)
