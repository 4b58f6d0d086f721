"""`python -m tests.server.slow serve ...`: kvmux with a slow engine, as tests.server.checked has one that checks."""

from tests.server.checked import main

if __name__ == "__main__":
    main(engine="tests.server.checked_engine:run_slowly")
