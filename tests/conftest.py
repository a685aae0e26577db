"""Every test runs without the tables and settings of whoever runs it."""

import os

import pytest


@pytest.fixture(autouse=True)
def _own_settings(tmp_path_factory, monkeypatch):
    for name in [name for name in os.environ if name.startswith("CHUNK_PLANNER")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
