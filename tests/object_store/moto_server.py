"""An S3 server: moto's, in this process, until it is killed. `python -m ... PORT`."""

from __future__ import annotations

import logging
import sys

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server


def serve(port: int) -> None:
    """Serve on a port of this machine."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    application = DomainDispatcherApplication(create_backend_app)
    make_server("127.0.0.1", port, application, threaded=True).serve_forever()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
