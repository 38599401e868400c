"""Fetching over real sockets: what comes, what is refused, and what a client is told."""

from __future__ import annotations

import re
import socket
import threading
import time

import deepseek_recipe as recipe
import numpy as np
import pytest

from orchestrator.vision import ImageLimits, ImageReader, ImageRefused
from orchestrator.vision.data_url import decode_data_url

HERE = "127.0.0.1"
OWN = {"networks": (f"{HERE}/32",)}


class Site:
    """Answers each connection to a loopback address with `answer(path)`: bytes to send, or a function of the socket."""

    def __init__(self, answer, host: str = HERE) -> None:
        self.answer, self.paths = answer, []
        self._socket = socket.create_server((host, 0))
        self.port = self._socket.getsockname()[1]
        self.url = f"http://{host}:{self.port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                path = connection.recv(65536).split(b" ")[1].decode()
                self.paths.append(path)
                answer = self.answer(path)
                connection.sendall(answer) if isinstance(answer, bytes) else answer(connection)
            except OSError:
                pass

    def close(self) -> None:
        self._socket.close()


def page(content: bytes, status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(content)}", "connection: close", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


def redirect(target: str) -> bytes:
    return page(b"", "302 Found", f"location: {target}")


@pytest.fixture
def site():
    made = []

    def start(answer, host: str = HERE) -> Site:
        made.append(Site(answer, host))
        return made[-1]

    yield start
    for each in made:
        each.close()


@pytest.fixture
def reader(nano):
    made = []

    def make(**limits) -> ImageReader:
        made.append(ImageReader(nano.config, ImageLimits(**limits)))
        return made[-1]

    yield make
    for each in made:
        each.close()


def urls(*names: str) -> list[recipe.ImageSource]:
    return [recipe.UrlImageSource(name, path=f"messages.0.content[{n}]") for n, name in enumerate(names)]


def refusal(reader: ImageReader, *names: str) -> ImageRefused:
    with pytest.raises(ImageRefused) as caught:
        reader.read(urls(*names))
    return caught.value


def test_images_come_in_order_and_once_each(reader, site, kit):
    pictures = {"/a": kit.noise(60, 50, 1), "/b": kit.noise(60, 50, 2)}
    server = site(lambda path: page(kit.encoded(pictures[path])))
    a, b = f"{server.url}/a", f"{server.url}/b"
    inline = recipe.BytesImageSource(kit.encoded(pictures["/a"]), path="x")
    found = reader(**OWN).read([*urls(b, a, b), inline])
    digests = [image.digest for image in found]
    assert digests[1] == digests[3] != digests[0] == digests[2]
    assert sorted(server.paths) == ["/a", "/b"]


def test_loopback_is_refused_unless_the_operator_says_otherwise(reader, site, kit):
    server = site(lambda path: page(kit.encoded(kit.noise(60, 50))))
    port = server.port
    spellings = [HERE, "localhost", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "0.0.0.0", "[::1]"]
    spellings += ["[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[::]", "127.0.0.1.", "LOCALHOST", "localhost."]
    strict = reader()
    messages = {str(refusal(strict, f"http://{host}:{port}/a")) for host in spellings}
    assert len(messages) == 1 and not server.paths
    assert len(reader(**OWN).read(urls(f"{server.url}/a"))) == 1


def test_redirects_are_asked_about_too(reader, site, kit):
    inner = site(lambda path: page(kit.encoded(kit.noise(60, 50))), "127.0.0.2")
    targets = {
        "/self": "/picture", "/inner": f"{inner.url}/x", "/name": f"http://localhost:{inner.port}/x",
        "/metadata": "http://169.254.169.254/latest/meta-data/", "/file": "file:///etc/passwd", "/loop": "/loop",
    }  # fmt: skip
    server = site(lambda p: redirect(targets[p]) if p in targets else page(kit.encoded(kit.noise(60, 50))))
    own = reader(**OWN)
    assert len(own.read(urls(f"{server.url}/self"))) == 1
    messages = {str(refusal(own, server.url + path)) for path in targets if path != "/self"}
    assert len(messages) == 1 and not inner.paths
    assert server.paths.count("/loop") < 20


def test_failures_look_alike_and_name_no_address(reader, site):
    """Otherwise a client could map the network behind the server by what it is told."""
    dead = socket.create_server((HERE, 0))
    port = dead.getsockname()[1]
    dead.close()
    server = site(lambda path: page(b"secret words", path[1:].replace("_", " ")))
    own = reader(**OWN)
    names = [f"{server.url}/404_Gone", f"{server.url}/500_Oops", f"{server.url}/401_No", f"http://{HERE}:{port}/"]
    names += ["http://10.0.0.1/", "http://169.254.169.254/latest", "http://nowhere.invalid/", "https://[fe80::1]/"]
    errors = [refusal(own, name) for name in names]
    assert len({str(error) for error in errors}) == 1 and {error.status for error in errors} == {400}
    text = str(errors[0])
    assert text.startswith("messages.0.content[0]: ") and not re.search(r"\d+\.\d+\.\d+|secret|invalid", text)


def test_too_many_bytes(reader, site):
    def endless(connection):
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            connection.sendall(bytes(65536))

    declared = b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n"
    for answer in (lambda path: endless, lambda path: declared, lambda path: page(bytes(50_001))):
        error = refusal(reader(**OWN, max_image_bytes=50_000), site(answer).url)
        assert error.status == 413 and "larger than 50000 bytes" in str(error)


def test_slow_servers_do_not_keep_a_request(reader, site):
    """Neither one that says nothing nor one that sends a byte now and then; both are waited for together."""

    def drip(connection):
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(100):
            connection.sendall(b"x")
            time.sleep(0.05)

    server = site(lambda path: drip if path == "/drip" else lambda connection: time.sleep(5))
    own, began = reader(**OWN, fetch_seconds=0.3), time.monotonic()
    refusal(own, f"{server.url}/drip", f"{server.url}/silent")
    assert time.monotonic() - began < 2


@pytest.mark.parametrize(
    "name",
    ["ftp://example.org/a", "file:///etc/passwd", "http://", "http:///x", "//example.org/a", "a.png", "gopher://x/"],
)
def test_only_web_addresses_are_tried(reader, name):
    assert "http" in str(refusal(reader(), name))


def test_urls_with_names_or_of_great_length(reader):
    assert "without a user name" in str(refusal(reader(), "http://user:secret@example.org/a"))
    assert "has 9017 characters, allowed are 8192" in str(refusal(reader(), "http://example.org"[:17] + "a" * 9000))


def test_fetching_can_be_forbidden(reader, site):
    server = site(lambda path: page(b""))
    assert "fetches no images" in str(refusal(reader(**OWN, fetch=False), server.url)) and not server.paths


def test_counts_and_sums(reader, kit):
    data = kit.encoded(kit.noise(60, 50))
    many = reader(max_images=2, max_total_bytes=2 * len(data), max_image_bytes=len(data))
    sources = [recipe.BytesImageSource(data, path=f"i{n}") for n in range(3)]
    assert len(many.read(sources[:2])) == 2 and many.read([]) == []
    with pytest.raises(ImageRefused, match="the request has 3 images, allowed are 2") as caught:
        many.read(sources)
    assert caught.value.status == 400
    with pytest.raises(ImageRefused, match=r"i1: the images of this request are larger than .* together") as caught:
        reader(max_total_bytes=2 * len(data) - 1).read(sources[:2])
    assert caught.value.status == 413
    with pytest.raises(ImageRefused, match=r"i0: the image is larger than") as caught:
        reader(max_image_bytes=len(data) - 1).read(sources[:1])
    assert caught.value.status == 413


def test_low_detail(nano, kit):
    """Of a model whose images are large enough for it to matter."""
    wide = ImageReader(kit.seeing(max_image_tokens=1024))
    data = kit.encoded(kit.noise(900, 600))
    high, low = (wide.read([recipe.BytesImageSource(data, detail)])[0].geometry for detail in ("high", "low"))
    assert high.width > 800 and low.width == 14 * 37
    wide.close()


GOOD = [
    "data:image/png;base64,aGVsbG8=", "data:;base64,aGVsbG8=", "DATA:IMAGE/PNG;BASE64,aGVsbG8", "data:image/png,hello",
    "data:,h%65llo", "data:image/png;charset=x;base64,aGVs\nbG8=", "data:image/png;base64,aGVsbG8%3D",
]  # fmt: skip
BAD = [
    "data:image/png;base64,!!!!",
    "data:image/png;base64,a",
    "data:image/png",
    "",
    "data:",
    "image/png;base64,aGVsbG8=",
]


@pytest.mark.parametrize("url", GOOD)
def test_data_urls(url):
    assert decode_data_url(url, 5, "x") == b"hello"
    with pytest.raises(ImageRefused, match="x: the image is larger than 4 bytes") as caught:
        decode_data_url(url, 4, "x")
    assert caught.value.status == 413


@pytest.mark.parametrize("url", BAD)
def test_broken_data_urls(url):
    with pytest.raises(ImageRefused) as caught:
        decode_data_url(url, 100, "x")
    assert caught.value.status == 400


def test_large_data_urls_are_refused_before_they_are_decoded(monkeypatch):
    monkeypatch.setattr("orchestrator.vision.data_url.unquote_to_bytes", lambda text: pytest.fail("it was decoded"))
    with pytest.raises(ImageRefused, match="larger"):
        decode_data_url("data:image/png;base64," + "A" * 1_000_000, 100_000, "x")


def test_the_declared_type_says_nothing(reader, kit):
    """A JPEG under the name of a PNG, and text under that of an image."""
    import base64

    image = kit.noise(60, 50)
    jpeg = base64.b64encode(kit.encoded(image, "JPEG")).decode()
    own = reader()
    found = own.read([recipe.DataUrlImageSource(f"data:image/png;base64,{jpeg}")])
    assert found[0].pixels.std() > 10 and isinstance(found[0].pixels, np.ndarray)
    with pytest.raises(ImageRefused, match=r"image: the image cannot be decoded"):
        own.read([recipe.DataUrlImageSource("data:image/png;base64,aGVsbG8=")])


def test_a_model_of_text_reads_none(nano):
    from dataclasses import replace

    with pytest.raises(ValueError, match="config: got a model without vision_config"):
        ImageReader(replace(nano.config, vision=None))
