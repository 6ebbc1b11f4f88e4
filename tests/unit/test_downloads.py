"""Downloads from a server of this test: resuming, and one sentence for each way in which they fail."""

from __future__ import annotations

import hashlib
import http.server
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_prep import downloads
from data_prep.downloads import RemoteFile, fetch_remote
from fairseq_collab.errors import CollabError

CONTENT = bytes(range(256)) * 5000
FORM = (
    '<html><head><title>Drive - Virus scan warning</title></head><body><form id="download-form" action="{action}"'
    ' method="get"><input type="submit" value="Download anyway"><input type="hidden" name="id" value="x&amp;y">'
    '<input type="hidden" name="confirm" value="t"></form></body></html>'
)


class Server(http.server.ThreadingHTTPServer):
    """Serves CONTENT as /file; `drop_after` bytes break a connection as often as `drops` says."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.ranges: list[str | None] = []
        self.drops, self.drop_after = 0, 0
        self.knows_ranges, self.says_length = True, True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path.startswith("/page"):
            return self.page("<html><title>Quota\n exceeded</title></html>")
        if self.path.startswith("/uc"):
            return self.page(FORM.format(action="/download?export=download"))
        if self.path.startswith("/download") and self.path != "/download?export=download&id=x%26y&confirm=t":
            return self.send_error(400)
        if not self.path.startswith(("/file", "/download")):
            return self.send_error(404)
        wanted = self.headers.get("Range")
        self.server.ranges.append(wanted)
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and self.server.knows_ranges else 0
        if start >= len(CONTENT):
            return self.send_error(416)
        body = CONTENT[start:]
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}")
        self.send_header("Content-Type", "application/octet-stream")
        if self.server.says_length:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.server.drops:
            self.server.drops -= 1
            body = body[: self.server.drop_after]
        self.wfile.write(body)

    def page(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(downloads, "PAUSE", 0.0)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def remote(server: Server, path: str = "/file", **more: object) -> RemoteFile:
    digest = "md5:" + hashlib.md5(CONTENT).hexdigest()
    return RemoteFile("a.tgz", server.url + path, **{"size": len(CONTENT), "digest": digest, **more})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_download_is_whole_and_used_again(server, tmp_path, capsys):
    path = fetch_remote(remote(server), tmp_path / "cache")
    assert path.read_bytes() == CONTENT
    assert names(tmp_path / "cache") == ["a.tgz"]
    fetch_remote(remote(server), tmp_path / "cache")
    assert server.ranges == [None]
    assert f"reusing {path}" in capsys.readouterr().out


def test_broken_connections_are_resumed_at_the_byte_they_broke_at(server, tmp_path):
    server.drops, server.drop_after = 2, 1000
    assert fetch_remote(remote(server), tmp_path).read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=1000-", "bytes=2000-"]


def test_a_part_of_an_earlier_run_is_continued(server, tmp_path):
    (tmp_path / ".a.tgz.part").write_bytes(CONTENT[:4321])
    assert fetch_remote(remote(server), tmp_path).read_bytes() == CONTENT
    assert server.ranges == ["bytes=4321-"]
    assert names(tmp_path) == ["a.tgz"]


def test_a_whole_part_needs_no_request(server, tmp_path):
    (tmp_path / ".a.tgz.part").write_bytes(CONTENT)
    fetch_remote(remote(server), tmp_path)
    assert server.ranges == []


def test_a_server_that_knows_no_ranges_starts_over(server, tmp_path):
    server.knows_ranges = False
    (tmp_path / ".a.tgz.part").write_bytes(b"x" * 100)
    assert fetch_remote(remote(server), tmp_path).read_bytes() == CONTENT
    assert server.ranges == ["bytes=100-"]


def test_a_part_longer_than_the_file_is_thrown_away(server, tmp_path):
    (tmp_path / ".a.tgz.part").write_bytes(CONTENT + b"more")
    assert fetch_remote(remote(server), tmp_path).read_bytes() == CONTENT


def test_truncated_download_is_said_and_goes_on_next_time(server, tmp_path):
    server.drops, server.drop_after = 99, 10
    with pytest.raises(CollabError, match="broke off after 50 bytes .* the same command goes on from there"):
        fetch_remote(remote(server), tmp_path)
    assert names(tmp_path) == [".a.tgz.part"]
    server.drops = 0
    assert fetch_remote(remote(server), tmp_path).read_bytes() == CONTENT
    assert server.ranges[-1] == "bytes=50-"


def test_truncation_without_a_length_is_found_by_the_published_size(server, tmp_path):
    server.drops, server.drop_after, server.says_length = 1, 1000, False
    assert fetch_remote(remote(server), tmp_path).read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=1000-"]


def test_wrong_digest_is_refused_and_not_kept(server, tmp_path):
    with pytest.raises(CollabError, match="is not the published file .*md5:.* instead of md5:0") as caught:
        fetch_remote(remote(server, digest="md5:0"), tmp_path)
    assert "\n" not in str(caught.value)
    assert names(tmp_path) == []


def test_another_size_is_refused_before_it_is_downloaded(server, tmp_path):
    with pytest.raises(CollabError, match="offers 1,280,000 bytes instead of 7: it is another file"):
        fetch_remote(remote(server, size=7), tmp_path)


def test_damaged_file_is_downloaded_again(server, tmp_path, capsys):
    path = fetch_remote(remote(server), tmp_path)
    path.write_bytes(CONTENT[:-1] + b"?")
    assert fetch_remote(remote(server), tmp_path).read_bytes() == CONTENT
    assert "is damaged (its digest is" in capsys.readouterr().out


def test_without_published_digest_the_first_one_is_recorded_and_checked(server, tmp_path, capsys):
    file = remote(server, size=None, digest=None)
    path = fetch_remote(file, tmp_path)
    digest = hashlib.sha256(CONTENT).hexdigest()
    assert (tmp_path / "a.tgz.sha256").read_text() == f"{digest}  a.tgz\n"
    assert f"sha256:{digest} is recorded in a.tgz.sha256" in capsys.readouterr().out
    path.write_bytes(b"other")
    assert fetch_remote(file, tmp_path).read_bytes() == CONTENT
    assert "is damaged" in capsys.readouterr().out
    path.unlink()
    (tmp_path / "a.tgz.sha256").write_text("0" * 64 + "  a.tgz\n")
    with pytest.raises(CollabError, match="is not the recorded file"):
        fetch_remote(file, tmp_path)


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("/nowhere", "answered 404 Not Found; download it in another way and name its folder with --raw"),
        ("/page", "gave a web page, titled 'Quota exceeded', not the file; download it with a browser"),
    ],
)
def test_what_the_server_refuses_is_one_sentence(server, tmp_path, path, sentence):
    with pytest.raises(CollabError) as caught:
        fetch_remote(remote(server, path), tmp_path)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "a.tgz").exists()


def test_refused_connection_is_one_sentence(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/file"
    with pytest.raises(CollabError) as caught:
        fetch_remote(RemoteFile("a.tgz", url), tmp_path)
    message = str(caught.value)
    assert f"a.tgz could not be downloaded from {url}" in message and "refused" in message and "\n" not in message


def test_confirmation_form_of_google_drive_is_sent(server, tmp_path):
    (tmp_path / ".a.tgz.part").write_bytes(CONTENT[:77])
    assert fetch_remote(remote(server, "/uc?export=download&id=x"), tmp_path).read_bytes() == CONTENT
    assert server.ranges == ["bytes=77-"]


def test_two_downloads_of_one_file_are_refused(server, tmp_path):
    import fcntl

    with (tmp_path / ".a.tgz.part").open("ab") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        with pytest.raises(CollabError, match="another data_prep is downloading"):
            fetch_remote(remote(server), tmp_path)
