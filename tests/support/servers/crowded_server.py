"""A server whose bound on connections is beyond its descriptors: `python -m tests.support.servers.crowded_server LOOP`.

Descriptors can then really run out. It writes its port to standard output, and ends with its standard input.
"""

from __future__ import annotations

import sys
from unittest import mock

from tests.support.servers.wire_server import wire_server
from weft.server.settings import Limits

FAR = 3000.0


def main() -> None:
    limits = Limits(header_seconds=FAR, idle_seconds=FAR)
    with (
        mock.patch("weft.server.http.connections.descriptors_for_connections", return_value=10_000),
        wire_server(limits, sys.argv[1]) as server,
    ):
        print(server.name[1], flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
