"""A headless Chromium, where there is one."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), "")
in_browser = pytest.mark.skipif(
    not BROWSER, reason="needs chromium on PATH, or its path in CHROMIUM"
)


def dump(url: str, profile: Path, budget: int = 2000, *flags: str) -> tuple[str, str]:
    """What a page's document is after its scripts have run, and what they logged."""
    result = subprocess.run(
        [
            BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu",
            f"--user-data-dir={profile}", f"--virtual-time-budget={budget}",
            "--enable-logging=stderr", *flags, "--dump-dom", url,
        ],
        capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    log = [line for line in result.stderr.splitlines() if ":CONSOLE" in line]
    return result.stdout, "\n".join(log)
