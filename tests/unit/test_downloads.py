"""Downloads from a server of this test: resuming, and one sentence for each way in which they fail."""

from __future__ import annotations

import hashlib
import socket
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from _server import Server  # noqa: E402

from data_prep.downloads import RemoteFile, fetch_remote  # noqa: E402
from fairseq_collab.errors import CollabError  # noqa: E402

CONTENT = bytes(range(256)) * 5000


@pytest.fixture
def server(serve) -> Server:
    return serve(CONTENT)


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
    assert names(tmp_path) == []


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
