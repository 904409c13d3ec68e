"""Programs import packages that only the environment of `make clients` has."""

collect_ignore_glob = ["programs/*", "__main__.py", "worker.py"]
