"""A watch over splits, a clock that no load slows down, scratch registries, and a browser."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from terminal import PATIENCE
from watermarks import watch

from capsule_zoo import experiments, registry
from capsule_zoo.data import datasets
from capsule_zoo.experiments import list_experiments
from capsule_zoo.inference.training import progress
from capsule_zoo.registry import list_models


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let experiments on watermarked digits fail if they read a split that they should not."""
    if hasattr(request.module, "few_digits"):
        list_experiments()  # so that every module of experiments is imported and watched
        watch(monkeypatch)


class SteadyClock:
    """A clock that goes on by five milliseconds whenever it is read."""

    seconds = 0.0

    def monotonic(self) -> float:
        self.seconds += 0.005
        return self.seconds

    process_time = monotonic


@pytest.fixture(autouse=True)
def steady_clock(monkeypatch: pytest.MonkeyPatch) -> SteadyClock:
    """Time training by readings of its clock: minutes are a number of steps on every machine."""
    clock = SteadyClock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget every entry, guide, data set and experiment that a test registers."""
    list_models()
    list_experiments()
    entries = {n: replace(e, guides=dict(e.guides)) for n, e in registry._registered.items()}
    monkeypatch.setattr(registry, "_registered", entries)
    for module, name in ((datasets, "_READERS"), (experiments, "_experiments")):
        monkeypatch.setattr(module, name, dict(getattr(module, name)))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start headless Chromium and keep its console; skip the test if there is no browser."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    chromium = next(filter(None, map(shutil.which, names)), None)
    driver = shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("there is no Chromium with its chromedriver to open a page with")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    opened = webdriver.Chrome(options, webdriver.ChromeService(driver))
    opened.command_executor.client_config.timeout = PATIENCE
    opened.set_page_load_timeout(PATIENCE)
    opened.set_script_timeout(PATIENCE)
    yield opened
    opened.quit()
