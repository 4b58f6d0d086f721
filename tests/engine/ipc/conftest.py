"""The socket that the tests of the API use, too."""

from tests.api.conftest import socket_path as socket_path
