"""`python -m tests.server.troubled serve ...`: kvmux with an engine that has troubles, and tells of each request."""

from tests.server.checked import main

if __name__ == "__main__":
    main(engine="tests.server.troubled_engine:run")
