"""Stands between the frontend and a worker's model files, and counts.

The daemon advertises the relay's address in its card. So the count of fetches
comes from the requests themselves and not from what the daemon says of them.
"""

import collections
import http.server
import threading
import urllib.error
import urllib.request


class Relay:
    """Forwards every GET to the worker's port and counts the paths."""

    def __init__(self, worker_port):
        self._lock = threading.Lock()
        self._paths = collections.Counter()
        relay = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                with relay._lock:
                    relay._paths[self.path] += 1
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{worker_port}{self.path}", timeout=10) as answer:
                        status, body = answer.status, answer.read()
                except urllib.error.HTTPError as err:
                    status, body = err.code, err.read()
                except OSError:   # the worker is gone; so it is for the frontend
                    self.close_connection = True
                    return
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def counts(self):
        """How often each file was fetched: {file name: count}."""
        with self._lock:
            return {path.rsplit("/", 1)[1]: n for path, n in self._paths.items()}

    def close(self):
        self._server.shutdown()
        self._server.server_close()
