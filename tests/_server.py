"""An HTTP server for tests of downloads: ranges, broken connections, web pages in place of files."""

from __future__ import annotations

import http.server

FORM = (
    '<html><head><title>Drive - Virus scan warning</title></head><body><form id="download-form" action="{action}"'
    ' method="get"><input type="submit" value="Download anyway"><input type="hidden" name="id" value="x&amp;y">'
    '<input type="hidden" name="confirm" value="t"></form></body></html>'
)


class Server(http.server.ThreadingHTTPServer):
    """Serves `content` as /file; `drop_after` bytes break a connection as often as `drops` says."""

    daemon_threads = True

    def __init__(self, content: bytes) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = content
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
        content = self.server.content
        wanted = self.headers.get("Range")
        self.server.ranges.append(wanted)
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and self.server.knows_ranges else 0
        if start >= len(content):
            return self.send_error(416)
        body = content[start:]
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
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
